"""`fedtailor report` and `fedtailor watch` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor.report.watch import Server
from tests.cli.conftest import Call, call, refused  # noqa: F401 - fixtures
from tests.report.pages import parsed


def test_report_writes_a_file(call: Call, runs: Path) -> None:  # noqa: F811
    run = runs / "fedavg-seed0"
    assert call("report", run) == (0, f"wrote {run / 'report.html'}\n", "")
    assert call("report", runs, "--out", "sub/all.html") == (0, "wrote sub/all.html\n", "")
    assert "traffic" in parsed(Path("sub/all.html").read_text(encoding="utf-8")).charts


def test_what_is_no_run_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:  # noqa: F811
    for command in ("report", "watch"):
        assert "nowhere: " in refused(command, tmp_path / "nowhere")


def test_watch_ends_quietly(call: Call, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def interrupted(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    code, out, err = call("watch", runs / "fedavg-seed0")
    assert (code, err) == (0, "")
    assert out.startswith(f"watching {runs / 'fedavg-seed0'} at http://127.0.0.1:")
