"""Commands as readers of a folder, in this process: what each prints and writes, or the error that it ends with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from typer.main import get_command

from fedtailor.cli.main import app
from fedtailor.errors import UserError
from fedtailor.report.write import page_of

Reader = Callable[[Path], Any]
MAIN = get_command(app)  # once: that takes longer than most commands
NAMED = re.compile(  # on a page
    r"cannot be read and (is|are) left out|could not be read and are not shown"
    r"|: changed since (it was written|the run)"
    r"|: damaged; it is not the JSON|: no such file|: cannot be read"
)
COMMANDS: set[Reader] = set()  # all of them
PASSING = ("seconds", "free", "now", "last_message", "process", "started", "time")  # what differs from look to look


def command(*words: str, writes: str = "") -> Reader:
    """A command line; {path} is the folder, {out} a file that it writes, {beside} the folder's parent."""

    def run(path: Path) -> Any:
        out = path.parent / writes if writes else None
        given = [word.format(path=path, out=out, beside=path.parent) for word in words]
        text = said(given)
        if out is None:
            return text
        content = out.read_bytes()
        out.unlink()
        return [text, content.hex()]

    COMMANDS.add(run)
    return run


def said(words: list[str]) -> Any:
    """What a command prints, JSON without what passes; what it ends with 2 for is raised, as any other error."""
    done = CliRunner().invoke(MAIN, words)  # type: ignore[arg-type]
    error = done.exception
    if isinstance(error, OSError) and error.filename is not None:  # as `main` tells it
        raise UserError(f"{error.filename}: {error.strerror}")
    if error is not None and not isinstance(error, SystemExit):
        raise error
    if done.exit_code not in (0, 1):
        raise UserError(done.output)
    return lasting(json.loads(done.stdout)) if "--json" in words else done.stdout


def lasting(value: Any) -> Any:
    """Without what differs from look to look."""
    if isinstance(value, dict):
        return {key: lasting(held) for key, held in value.items() if key not in PASSING}
    return [lasting(held) for held in value] if isinstance(value, list) else value


def reported(path: Path) -> Any:
    """The page of a report, before it is drawn, which takes far longer."""
    text = str(page_of(path))
    if NAMED.search(text):
        raise UserError("said on the page")
    return text


def resumed(path: Path) -> Any:
    """An interrupted run gone on with, in a copy: its results and rounds."""
    copy = path.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    said(["resume", str(copy)])
    shown = said(["show", str(copy), "--json"])
    models = {f.name: f.read_bytes().hex() for f in sorted(copy.rglob("personal/*/*.safetensors"))}
    return [{k: v for k, v in shown.items() if k != "folder"}, models]


COMMANDS |= {reported, resumed}
