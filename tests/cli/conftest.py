"""The command line called in this process, in an empty folder, 80 columns wide."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli_w

from fedtailor.cli import main as cli
from fedtailor.cli.output import console
from tests.small import DIGITS


class Said(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call `fedtailor` with these arguments; small.toml is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)
    monkeypatch.setattr(console, "width", 80)
    Path("small.toml").write_text(tomli_w.dumps(DIGITS | {"rounds": 2}))

    def run(*arguments: str | os.PathLike[str]) -> Said:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedtailor", *map(str, arguments)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code or 0
        assert isinstance(code, int)
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(call: Call) -> Callable[..., str]:
    """Call `fedtailor` and expect the one line on stderr and the code 2 of a mistake that the user can put right."""

    def run(*arguments: str | os.PathLike[str]) -> str:
        code, out, err = call(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return err[len("error: ") : -1]

    return run
