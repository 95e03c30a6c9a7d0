"""`fedtailor check`: does an algorithm keep what every algorithm promises?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from fedtailor.cli.options import Settings, console
from fedtailor.errors import ConfigError

if TYPE_CHECKING:
    from fedtailor.testing import Finding

COLORS = {"holds": "green", "broken": "red", "not promised": "dim"}


def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help='An algorithm: "module:Class", or a name of ours.')],
    settings: Settings = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Check that an algorithm keeps what every algorithm promises.

    Runs it on small made federations, on every engine: the engines agree, the order of clients does not matter,
    absent clients are untouched, a saved state continues as the straight run, nothing undeclared crosses. Says in
    words what broke. Exit code 1 if anything did.

    Example: fedtailor check mymethod:MyMethod --set algorithm.mu=0.5
    """
    from fedtailor import algorithms
    from fedtailor.experiments.config import with_settings
    from fedtailor.testing import check_algorithm

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


def _print(findings: list[Finding]) -> None:
    """One line per promise; below it what is broken, each in words."""
    grid = Table.grid(padding=(0, 2))
    for promise in dict.fromkeys(f.promise for f in findings):
        some = [f for f in findings if f.promise == promise]
        counts = {v: sum(f.verdict == v for f in some) for v in COLORS}
        told = ", ".join(f"[{COLORS[v]}]{v}[/] in {n}" for v, n in counts.items() if n)
        reasons = dict.fromkeys(f.words for f in some if f.verdict == "not promised")
        grid.add_row(escape(promise), told + (f" [dim]({escape('; '.join(reasons))})[/dim]" if reasons else ""))
    console.print(grid, highlight=False)
    broken: dict[str, list[Finding]] = {}
    for f in findings:
        if f.verdict == "broken":
            broken.setdefault(f"{f.promise}: {f.words}", []).append(f)
    for words, some in broken.items():
        console.print(f"\n[red]broken[/red] in {escape('; '.join(f.where for f in some))}", highlight=False)
        console.print(escape(words), highlight=False)
    verdict = f"{sum(map(len, broken.values()))} of {len(findings)} checks broken" if broken else "all promises hold"
    console.print(f"\n{verdict}", highlight=False)
