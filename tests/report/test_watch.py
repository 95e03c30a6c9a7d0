"""The page while a run goes on: to this machine only, two addresses, and news when there is some."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from fedtailor.errors import RunError
from fedtailor.report.watch import Server, server
from tests.report.pages import parsed


@pytest.fixture
def served(runs: Path) -> Iterator[Server]:
    with server(runs / "fedavg-seed0") as made:
        thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(made: Server, path: str, host: str = "", method: str = "GET") -> tuple[int, dict[str, str], str]:
    """One request; the Host is the right one unless told otherwise."""
    connection = http.client.HTTPConnection("127.0.0.1", made.server_port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{made.server_port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.headers), text


def test_page_and_data(served: Server) -> None:
    assert served.server_address[0] == "127.0.0.1"
    code, headers, text = ask(served, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert "learning-accuracy" in parsed(text).charts
    assert ask(served, "/", f"localhost:{served.server_port}")[0] == 200
    assert json.loads(ask(served, "/data")[2])["finished"] is True


def test_news_change_the_version(served: Server, runs: Path) -> None:
    before = json.loads(ask(served, "/data")[2])["version"]
    assert json.loads(ask(served, "/data")[2])["version"] == before
    metrics = runs / "fedavg-seed0/metrics.jsonl"
    metrics.write_text(metrics.read_text().split("\n", 1)[0] + "\n")
    assert json.loads(ask(served, "/data")[2])["version"] != before
    assert len(parsed(ask(served, "/")[2]).rows("learning-accuracy")) == 1


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1.evil.example:{port}"])
def test_other_names_are_refused(served: Server, host: str) -> None:
    code, _, text = ask(served, "/", host.format(port=served.server_port))
    assert code == 403
    assert "fedavg" not in text


def test_nothing_else_is_there(served: Server) -> None:
    for path in ("/config.toml", "/../run.json", "/data?x", "/favicon.ico"):
        assert ask(served, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(served, "/", method=method)[0] == 501


def test_a_damaged_run_is_said_not_raised(served: Server, runs: Path) -> None:
    (runs / "fedavg-seed0/run.json").write_text("{")
    code, _, text = ask(served, "/")
    assert code == 503
    assert "run.json: damaged" in text


def test_what_cannot_be_watched(served: Server, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="neither a run"):
        server(tmp_path / "nowhere")
    with pytest.raises(RunError, match=f"--port {served.server_port}: cannot be used"):
        server(runs / "fedavg-seed0", served.server_port)
    with pytest.raises(RunError, match="between 0 and 65535"):
        server(runs / "fedavg-seed0", 70000)
