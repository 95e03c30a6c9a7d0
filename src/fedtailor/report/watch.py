"""`fedtailor watch`: the page of a run in progress, served on this machine only."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import compare_digest
from threading import Lock
from typing import Any, Protocol

from fedtailor.errors import RunError, UserError
from fedtailor.experiments.store import METRICS, RESULTS
from fedtailor.report.page import policy, render_html
from fedtailor.report.recorded_run import is_comparison
from fedtailor.report.write import page_of

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # what a browser on this machine may call it


def version(path: Path) -> str:
    """A hash that changes whenever a run has progressed."""
    files = [*path.glob(METRICS), *path.glob(RESULTS), *path.glob(f"*/{METRICS}"), *path.glob(f"*/{RESULTS}")]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]


class WatchedPage:
    """The page of a folder, rendered again only when something has changed."""

    def __init__(self, path: Path, data_root: Path | None = None) -> None:
        self.path, self.data_root = path, data_root
        self._lock = Lock()
        self._cached: tuple[str, bool, str] | None = None

    def current(self) -> tuple[str, bool, str]:
        """The version, whether the run is finished, and the page."""
        with self._lock:
            new = version(self.path)
            if self._cached is None or self._cached[0] != new:
                page = page_of(self.path, self.data_root)
                self._cached = (new, page.finished, render_html(page, live=True))
            return self._cached


class Watched(Protocol):
    """What a `Server` shows."""

    def current(self) -> tuple[str, bool, str]:
        """The version, whether nothing more will come, and the page."""


class Server(ThreadingHTTPServer):
    """Serves `/` and `/data` to this machine; with a token, below a folder of that name, which others cannot guess."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int, token: str = "") -> None:
        self.watched = watched
        self.root = f"/{token}/" if token else "/"
        super().__init__((HOST, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}{self.root}"


class Handler(BaseHTTPRequestHandler):
    """GET only. The Host must be one of ours, so that a web page cannot reach the server by DNS rebinding."""

    server: Server
    server_version, sys_version = "fedtailor", ""

    def do_GET(self) -> None:
        allowed = {f"{name}:{self.server.server_port}" for name in NAMES}
        if self.headers.get("Host") not in allowed:
            self._answer(403, "text/plain", "this page is only for this machine")
        elif not any(compare_digest(self.path.encode(), f"{self.server.root}{name}".encode()) for name in ("", "data")):
            self._answer(404, "text/plain", "only / and /data are here, below the token if there is one")
        else:
            self._content("/" if self.path.endswith("/") else "/data")

    def _content(self, path: str) -> None:
        try:
            version, finished, page = self.server.watched.current()
        except (UserError, OSError) as error:
            self._answer(503, "text/plain", str(error))
            return
        if path == "/":
            self._answer(200, "text/html", page)
        else:
            self._answer(200, "application/json", json.dumps({"version": version, "finished": finished}))

    def _answer(self, code: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(code)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        headers |= {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        headers |= {"Content-Security-Policy": policy(live=True), "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged to the terminal."""


def server(path: Path, port: int = 0, data_root: Path | None = None) -> Server:
    """A server that is not started yet; raises `RunError` if the folder is not a run or the port is in use."""
    is_comparison(path)
    try:
        return Server(WatchedPage(path, data_root), port)
    except OSError as error:
        raise RunError(f"--port {port}: cannot be used: {error.strerror}; 0 takes a free one") from None
    except OverflowError:
        raise RunError(f"--port {port}: must be between 0 and 65535; 0 takes a free one") from None
