"""Pages run in an empty folder and leave nothing behind."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedtailor import algorithms


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a page; what it registers and imports is forgotten afterwards."""
    monkeypatch.setattr(algorithms, "_registered", dict(algorithms._registered))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    here = [k for k, m in sys.modules.items() if str(getattr(m, "__file__", None) or "").startswith(str(tmp_path))]
    for name in here:
        del sys.modules[name]
