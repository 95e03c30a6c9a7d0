"""A participant's status for Prometheus, over HTTP on this machine only."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError, UserError
from fedtailor.flare.operate import prometheus_text, read_status

HOST = "127.0.0.1"


class MetricsServer(ThreadingHTTPServer):
    """Answers GET /metrics. Prometheus is on this machine, or comes through a proxy that the operator has set up."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        try:
            super().__init__((HOST, port), MetricsHandler)
        except (OSError, OverflowError) as error:
            raise RunError(f"--serve {port}: cannot be used: {error}") from None


class MetricsHandler(BaseHTTPRequestHandler):
    """GET only; the Host must be this machine, so that no web page can reach it by DNS rebinding."""

    server: MetricsServer
    server_version, sys_version = "fedtailor", ""

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in hosts:
            self._answer(403, "only for this machine")
        elif self.path != "/metrics":
            self._answer(404, "only /metrics is here")
        else:
            try:
                self._answer(200, prometheus_text(read_status(self.server.folder)))
            except (UserError, OSError) as error:
                self._answer(503, str(error))

    def _answer(self, code: int, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged to the terminal."""
