"""Pages run in an empty folder and leave nothing behind."""

from pathlib import Path

import pytest

from fedtailor import algorithms


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a page; algorithms that it registers are forgotten afterwards."""
    monkeypatch.setattr(algorithms, "_registered", dict(algorithms._registered))
    monkeypatch.chdir(tmp_path)
    return tmp_path
