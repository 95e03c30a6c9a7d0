"""`fedtailor check`: does an algorithm keep what every algorithm promises; or, are these files fit to be fitted?"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from fedtailor.cli.options import Settings
from fedtailor.cli.output import console
from fedtailor.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedtailor.testing import Finding

COLORS = {"holds": "green", "broken": "red", "not promised": "dim"}


def check(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help='An algorithm: "module:Class" or a built-in name. Or files, as for fit.'),
    ],
    target: Annotated[str, typer.Option("--target", help="For files: the column to predict.")] = "",
    client_column: Annotated[
        str | None, typer.Option("--client-column", help="For one file with all sites: the column that names them.")
    ] = None,
    settings: Settings = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Check an algorithm against the contract of all algorithms; or check files before a fit.

    Files: lists all problems of all files at once, and how each column is interpreted. Exit code 1 if there is
    a problem. Example: fedtailor check sites --target outcome

    Algorithms: runs it on small synthetic federations, on every engine, and checks that engines agree, that the
    order of clients does not matter, that absent clients are untouched, that a resumed run equals an uninterrupted
    one, and that nothing undeclared is sent. Exit code 1 if any of these fails.
    Example: fedtailor check mymethod:MyMethod --set algorithm.mu=0.5
    """
    from fedtailor import algorithms
    from fedtailor.experiments.config import with_settings
    from fedtailor.testing import check_algorithm

    if target or client_column or Path(name).exists():
        _check_files(Path(name), target, client_column, settings, as_json)
        return
    tables = with_settings({}, settings)
    if wrong := [key for key in tables if key != "algorithm"]:
        raise ConfigError(f"--set {wrong[0]}: check takes options of the algorithm only, such as algorithm.mu=0.5")
    algorithm = algorithms.make(name, tables.get("algorithm", {}))
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True, disable=as_json)
    with bar:
        task = bar.add_task("checking")
        findings = check_algorithm(
            algorithm, raises=False, progress=lambda f: bar.update(task, description=f"{f.promise}: {escape(f.where)}")
        )
    broken = [f for f in findings if f.verdict == "broken"]
    if as_json:
        print(json.dumps([vars(f) for f in findings], indent=1))
    else:
        _print(findings)
    if broken:
        raise typer.Exit(1)


def _check_files(path: Path, target: str, client_column: str | None, settings: list[str], as_json: bool) -> None:
    from fedtailor.data.configs import FolderConfig
    from fedtailor.data.tabular.problems import find_problems
    from fedtailor.experiments.config import parse, with_settings
    from fedtailor.tables.fit_sources import source_of

    config = parse(with_settings({"data": source_of(path, target, client_column)}, settings), origin="check").data
    if not isinstance(config, FolderConfig):
        raise ConfigError(f"check {path}: only files of your own can be checked")
    messages, notes = find_problems(config)
    if as_json:
        print(json.dumps({"problems": messages, "notes": notes}, indent=1, ensure_ascii=False))
    else:
        verdict = f"{len(messages)} problem{'' if len(messages) == 1 else 's'}" if messages else "no problems"
        print("\n".join([*notes, *(f"problem: {as_options(words)}" for words in messages), verdict]))
    if messages:
        raise typer.Exit(1)


@contextmanager
def all_problems(again: list[str], source: dict[str, Any]) -> Iterator[None]:
    """Add to the first problem of files how many more there are, and the command that lists them."""
    from fedtailor.data.configs import FolderConfig
    from fedtailor.data.tabular.problems import find_problems
    from fedtailor.experiments.config import parse

    try:
        yield
    except DataError as error:
        config = parse({"data": source}, origin="fit").data
        if not isinstance(config, FolderConfig):
            raise
        messages, _ = find_problems(config)
        others = [words for words in messages if words != str(error)]
        if not others or str(error) not in messages:
            raise
        raise DataError(
            f"{error}. {len(others)} more: {shlex.join(['fedtailor', *again])} lists all", code=error.code
        ) from None


def as_options(message: str) -> str:
    """Keys of a configuration as command-line options: data.ignore = ['x'] becomes --set 'data.ignore=["x"]'."""

    def option(match: re.Match[str]) -> str:
        value = match[2].replace("'", '"') if match[2].startswith("[") else match[2].strip("'")
        return f"--set '{match[1]}={value}'"

    return re.sub(r"(?:set )?\b(data\.\w+) = (\[[^\]]*\]|'[^']*'|\d+)", option, message)


def _print(findings: list[Finding]) -> None:
    """Print one line per promise; then what is broken, and why."""
    grid = Table.grid(padding=(0, 2))
    for promise in dict.fromkeys(f.promise for f in findings):
        group = [f for f in findings if f.promise == promise]
        counts = {v: sum(f.verdict == v for f in group) for v in COLORS}
        summary = ", ".join(f"[{COLORS[v]}]{v}[/] in {n}" for v, n in counts.items() if n)
        reasons = dict.fromkeys(f.words for f in group if f.verdict == "not promised")
        grid.add_row(escape(promise), summary + (f" [dim]({escape('; '.join(reasons))})[/dim]" if reasons else ""))
    console.print(grid, highlight=False)
    broken: dict[str, list[Finding]] = {}
    for f in findings:
        if f.verdict == "broken":
            broken.setdefault(f"{f.promise}: {f.words}", []).append(f)
    for words, group in broken.items():
        console.print(f"\n[red]broken[/red] in {escape('; '.join(f.where for f in group))}", highlight=False)
        console.print(escape(words), highlight=False)
    verdict = f"{sum(map(len, broken.values()))} of {len(findings)} checks broken" if broken else "all promises hold"
    console.print(f"\n{verdict}", highlight=False)
