"""Commands to begin with: what there is, a configuration and its schema, public data."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from fedtailor.cli.options import AsJson, DataRoot
from fedtailor.cli.output import console, print_json
from fedtailor.errors import ConfigError, nearest

Detail = str | list[str] | dict[str, Any]  # words, names, or options with their defaults
Entry = tuple[str, str, dict[str, Detail]]  # name, what it is, details
Groups = Mapping[str, Iterable[Entry]]  # by title, which may be empty


def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, data, models or engines.")] = "all",
    learns: Annotated[str, typer.Option(help="Only algorithms that learn this, such as weights.")] = "",
    keeps: Annotated[str, typer.Option(help="Only algorithms whose clients keep this, such as head.")] = "",
    as_json: AsJson = False,
) -> None:
    """List algorithms, data sources, models and engines.

    Algorithms are grouped by what they learn, with what stays private, what is sent, and their options.
    """
    lists = entries_of(what, learns, keeps)
    if as_json:
        print_json({k: [{"name": n, "about": t, **d} for g in v.values() for n, t, d in g] for k, v in lists.items()})
        return
    for kind, groups in lists.items():
        if len(lists) > 1:
            console.print(f"[bold]{kind}[/bold]")
        for title, entries in groups.items():
            if title:
                console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True, style="cyan")
            grid.add_column()
            for name, text, details in entries:
                grid.add_row(escape(name), escape(text))
                for label, detail in details.items():
                    grid.add_row("", f"[dim]{label}:[/dim] {escape(_words(detail))}")
            console.print(grid, highlight=False)


def entries_of(what: str, learns: str, keeps: str) -> dict[str, Groups]:
    """Entries by group, for each kind of thing; of algorithms those that learn and keep this."""
    if (learns or keeps) and what not in ("all", "algorithms"):
        raise ConfigError(f"list {what}: --learns and --keeps are for algorithms")
    kinds: dict[str, Callable[[], Groups]] = {
        "algorithms": lambda: _algorithms(learns, keeps),
        "data": lambda: {"": _data()},
        "models": lambda: {"": _models()},
        "engines": lambda: {"": _engines()},
    }
    if what != "all" and what not in kinds:
        raise ConfigError(f'list: nothing called "{what}"; {nearest(what, kinds)}')
    wanted = "algorithms" if learns or keeps else what
    return {kind: entries() for kind, entries in kinds.items() if wanted in ("all", kind)}


def _words(detail: Detail) -> str:
    if isinstance(detail, dict):
        return ", ".join(f"{k} = {v}" for k, v in detail.items()) or "none"
    return ", ".join(detail) if isinstance(detail, list) else detail


def _algorithms(learns: str, keeps: str) -> Groups:
    from fedtailor.algorithms import algorithms
    from fedtailor.core.algorithm import KEEPS, LEARNS, reply_names

    for option, value, known in (("learns", learns, LEARNS), ("keeps", keeps, KEEPS)):
        if value and value not in known:
            raise ConfigError(f'list: --{option}: nothing called "{value}"; {nearest(value, known)}')
    titles = {key: f"learns {key}: {words}" for key, words in LEARNS.items()}
    groups: dict[str, list[Entry]] = {title: [] for title in (*titles.values(), "others")}
    for name, kind in algorithms().items():
        if (learns and kind.learns != learns) or (keeps and kind.keeps != keeps):
            continue
        module = sys.modules[kind.__module__].__doc__ or kind.__doc__ or ""
        options = {f.name: f.default for f in dataclasses.fields(kind)}
        sent = ", ".join(reply_names(kind)) or "nothing"
        details = {"keeps": kind.keeps, "private": kind.private, "sent": sent}
        filled: dict[str, Detail] = {k: v for k, v in details.items() if v}
        entry = name, module.splitlines()[0], filled | {"options": options}
        groups[titles.get(kind.learns, "others")].append(entry)
    filled_groups = {title: entries for title, entries in groups.items() if entries}
    if not filled_groups:
        raise ConfigError(f'list: no algorithm learns "{learns}" and keeps "{keeps}"')
    return filled_groups


def _data() -> Iterator[Entry]:
    from fedtailor.data import SOURCES

    for name, info in SOURCES.items():
        yield name, info.description, {"keys": [k for k in info.config.model_fields if k != "source"]}


def _models() -> Iterator[Entry]:
    from fedtailor.models import MODELS

    for name, kind in MODELS.items():
        known = [p for k, p in inspect.signature(kind).parameters.items() if k not in ("shape", "outputs")]
        details: dict[str, Detail] = {"options": {p.name: p.default for p in known}} if known else {}
        yield name, (kind.__doc__ or "").splitlines()[0], details
    yield "module:Class", "your own nn.Module, made as Class(shape, outputs); name its head with model.head", {}


def _engines() -> Iterator[Entry]:
    from fedtailor.engines import ENGINES

    for name, text in ENGINES.items():
        yield name, text, {}


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.")] = Path("config.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration with every key at its default.

    Options of the model and the algorithm are commented out, because they depend on which ones you choose.
    """
    from fedtailor.studies.schema import template

    if path.exists() and not force:
        raise ConfigError(f"{path}: exists already; --force replaces it")
    path.write_text(template(), encoding="utf-8")
    print(f"wrote {path}; run it with: {shlex.join(['fedtailor', 'run', str(path)])}")


def schema() -> None:
    """Print the JSON schema of a configuration.

    For editors, agents and validators: every key of a run, a comparison or a published table with its default, allowed
    values and description; options of algorithms and models by name.

    Example: fedtailor schema > fedtailor.schema.json, and "#:schema fedtailor.schema.json" at the top of config.toml
    """
    from fedtailor.studies.schema import configuration_schema

    print_json(configuration_schema())


def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data source such as mnist; see fedtailor list data.")],
    data_root: DataRoot = None,
) -> None:
    """Download a public data set and check it.

    Files are fetched from their official address and saved only if their checksum is correct.
    """
    from fedtailor.data.download import fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def listen(file: str, received: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=total)
            progress.update(tasks[file], completed=received, total=total)

        paths = fetch(name, data_root, progress=listen)
    for path in paths:
        print(path)
