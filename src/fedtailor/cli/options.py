"""Arguments that several commands take, and the console they print to."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console()

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML configuration; fedtailor init writes one.")]


def _latest(path: Path) -> Path:
    """Of a fit that was updated the models that serve now."""
    from fedtailor.experiments.store import latest

    return latest(path)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", callback=_latest)]
RunOrRuns = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or a comparison.", callback=_latest)]
RunOrFit = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or a fit.", callback=_latest)]
Site = Annotated[str, typer.Option("--site", help="Site whose model to use.")]
Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as local.lr=0.1; repeatable.")
]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of data sets; default: FEDTAILOR_DATA or the user cache.")
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps or xpu; as federation.device."),
]
Trust = Annotated[bool, typer.Option("--trust", help='Run code outside fedtailor that RUN names ("module:Class").')]
Out = Annotated[Path | None, typer.Option("--out", help="Output folder; default: a new one under runs/.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]


def progress_aside(as_json: bool) -> AbstractContextManager[Any]:
    """Where the result is JSON, what is printed before it goes to stderr."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def print_json(value: Any) -> None:
    """Strict JSON: null where a number is not finite, text for paths."""
    print(json.dumps(_plain(value), indent=1, allow_nan=False, ensure_ascii=False, default=str))


def aligned(lines: list[str]) -> list[str]:
    """Lines for a terminal: rows of Markdown tables are aligned, two blank lines become one."""
    aligned_lines: list[str] = []
    table: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            table += [[cell.strip() for cell in line.strip("|").split("|")]] if not set(line) <= set("|-: ") else []
            continue
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        aligned_lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        table = []
        if line or (aligned_lines and aligned_lines[-1]):
            aligned_lines.append(line)
    return aligned_lines[:-1] if aligned_lines and not aligned_lines[-1] else aligned_lines


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
