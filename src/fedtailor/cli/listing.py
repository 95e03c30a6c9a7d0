"""What `fedtailor list`, `show` and `download` print."""

from __future__ import annotations

import dataclasses
import inspect
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from fedtailor.errors import ConfigError, RunError, nearest

if TYPE_CHECKING:
    from fedtailor.serving.onboard import Newcomer

NAME, TITLE = 20, 12  # widths that names and titles of columns keep where a table is too wide; they are folded
FRAME = 3  # width of the lines and blanks of a column


def print_listing(console: Console, what: str, learns: str = "", keeps: str = "") -> None:
    """What there is: name, what it is, and below it the details; of algorithms, those that learn and keep this."""
    lists = listed(what, learns, keeps)
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


def listed(what: str, learns: str = "", keeps: str = "") -> dict[str, Groups]:
    """Entries by group, for each kind of thing that is asked for."""
    if (learns or keeps) and what not in ("all", "algorithms"):
        raise ConfigError(f"list {what}: --learns and --keeps are for algorithms")
    kinds: dict[str, Callable[[], Groups]] = {
        "algorithms": lambda: _algorithms(learns, keeps),
        "data": lambda: {"": list(_data())},
        "models": lambda: {"": list(_models())},
        "engines": lambda: {"": list(_engines())},
    }
    if what != "all" and what not in kinds:
        raise ConfigError(f'list: nothing called "{what}"; {nearest(what, kinds)}')
    wanted = "algorithms" if learns or keeps else what
    return {kind: entries() for kind, entries in kinds.items() if wanted in ("all", kind)}


def _words(detail: Detail) -> str:
    if isinstance(detail, dict):
        return ", ".join(f"{k} = {v}" for k, v in detail.items()) or "none"
    return ", ".join(detail) if isinstance(detail, list) else detail


Detail = str | list[str] | dict[str, Any]  # words, names, or options with their defaults
Entry = tuple[str, str, dict[str, Detail]]  # name, what it is, details
Groups = Mapping[str, Iterable[Entry]]  # by title, which may be empty


def _algorithms(learns: str = "", keeps: str = "") -> Groups:
    """By what is learned."""
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
    listed_groups = {title: entries for title, entries in groups.items() if entries}
    if not listed_groups:
        raise ConfigError(f'list: no algorithm learns "{learns}" and keeps "{keeps}"')
    return listed_groups


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


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], last: Sequence[str] = ()
) -> None:
    """A table whose first column names the rows. Figures are never cut: what does not fit stands in further tables."""
    cells = [list(row) for row in (*rows, last) if row]
    room = console.width - 1
    widths = _widths([list(columns), *cells])
    if _with_frame(widths) > room:
        bodies = _widths(cells)
        widths = [max(min(body, NAME), min(whole, TITLE)) for body, whole in zip(bodies, widths, strict=True)]
    for block in _blocks(widths, room):
        left = room - FRAME - _with_frame([widths[i] for i in block])
        names = min(left, max(cell_len(row[0]) for row in [columns, *cells]))
        table = Table(title=escape(title), title_justify="left", header_style="bold")
        for i, width in ((0, max(names, widths[0])), *((i, widths[i]) for i in block)):
            table.add_column(escape(columns[i]), width=width, overflow="fold")
        for number, row in enumerate(cells):
            table.add_row(*(escape(row[i]) for i in (0, *block)), end_section=bool(last) and number == len(rows) - 1)
        console.print(table)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _with_frame(widths: Sequence[int]) -> int:
    return sum(widths) + FRAME * len(widths)


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns after the first, as many side by side with it as there is room for."""
    blocks: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        if blocks[-1] and _with_frame([widths[k] for k in (0, *blocks[-1], i)]) > room:
            blocks.append([])
        blocks[-1].append(i)
    return blocks


def print_run(console: Console, path: Path, clients: bool) -> None:
    """A run, or a comparison, in a few lines."""
    from fedtailor.experiments.store import FIT, RunFolder, read_json
    from fedtailor.studies import result_tables
    from fedtailor.studies.compare import GRID, TABLE, local_reference
    from fedtailor.studies.result_tables import number, private_words, size

    quoted = shlex.quote(str(path))
    if (path / FIT).exists():
        record = read_json(path / FIT)
        if "sites" not in record:
            raise RunError(f"{path}: an unfinished fit; continue with the same fedtailor fit and --out {quoted}")
        from fedtailor.cli.fit_listing import print_fit

        print_fit(console, record)
        return
    if (path / GRID).exists():
        if not (path / TABLE).exists():
            raise RunError(f"{path}: an unfinished comparison; continue with: fedtailor compare CONFIG --out {quoted}")
        print(result_tables.read(path, TABLE), end="")
        return
    folder = RunFolder.open(path)
    config, about, results = folder.config, folder.about, folder.results
    sizes = about["train_samples"]
    print(f"run        {path}")
    print(f"task       {about['data']}: {about['task']}, {len(sizes)} clients, {sum(sizes)} training samples")
    for note in about["notes"]:
        print(f"           {note}")
    print(f"algorithm  {config.algorithm.name}  {_options(config.algorithm.options)}".rstrip())
    ranks = f" on {about['ranks']} ranks" if about.get("ranks", 1) > 1 else ""
    why = _reason(about.get("engine_why"))
    print(f"model      {config.model.name}, {about['parameters']} parameters")
    print(f"engine     {about['engine']}{ranks}{why}")
    print(f"device     {about.get('device', 'cpu')}{_reason(about.get('device_why'))}")
    if results is None:
        rounds = len(folder.metrics())
        print(f"status     {rounds} of {config.rounds} rounds; continue with: fedtailor resume {quoted}")
        return
    local = local_reference(folder)
    _print_results(console, results, local)
    if "unseen" in results:
        gap = number(results["metric"], results["unseen"]["gap"][results["metric"]])
        print(f"gap        {gap}: mean of the clients that trained minus that of the unseen ones, last round")
    if local is None and config.algorithm.name != "local":
        print("hurt       unknown: no Local run on this task beside it")
    traffic = results["traffic"]
    print(f"traffic    {size(traffic['up'])} up, {size(traffic['down'])} down, {traffic['trips']} trips")
    print(f"time       {results['seconds']} s")
    if "privacy" in results:
        print(f"privacy    {private_words(results['privacy'])}")
    if results["faults"] or results["abandoned"]:
        print(f"faults     {results['faults']} replies rejected, {results['abandoned']} rounds abandoned:")
        for line in folder.metrics():
            for fault in line.get("faults", []):
                print(f"           round {fault['round']}, {fault['client']}, {fault['function']}: {fault['reason']}")
    if clients:
        _print_clients(console, about, results)


def _print_results(console: Console, results: dict[str, Any], local: dict[str, Any] | None) -> None:
    from fedtailor.metrics.summary import share_hurt
    from fedtailor.studies.result_tables import number

    metric, higher = results["metric"], results["higher_is_better"]
    rows = []
    titles = {"last": "last round", "selected": "selected on validation", "unseen": "unseen clients"}
    for kind, title in titles.items():
        if kind not in results:
            continue
        summary = results[kind]["test"][metric]
        hurt = math.nan
        if local is not None and kind != "unseen":
            mine, theirs = results[kind]["clients"][metric], local[kind]["clients"][metric]
            hurt = share_hurt(mine, theirs, higher_is_better=higher)
        figures = [number(metric, summary[k]) for k in ("mean", "std", "worst_tenth")]
        share = "-" if math.isnan(hurt) else f"{100 * hurt:.0f} %"
        rows.append([title, str(results[kind]["round"]), *figures, share])
    columns = ("", "round", "mean", "client std", "worst tenth", "hurt")
    print_table(console, f"test {metric}{unit(metric)}", columns, rows)


def print_newcomer(name: str, newcomer: Newcomer) -> None:
    """Its samples, its metrics, and where its model is."""
    from fedtailor.studies.result_tables import number

    samples = ", ".join(f"{count} {split}" for split, count in newcomer.samples.items())
    print(f"newcomer   {name}: {samples} samples")
    for split, metrics in newcomer.metrics.items():
        if not newcomer.samples[split]:
            continue
        print(f"{split:<10} " + ", ".join(f"{k} {number(k, v)}{unit(k)}" for k, v in metrics.items()))
    if newcomer.curve is not None:
        _print_curve(newcomer.curve)
    print(f"model      {newcomer.path}")


def _print_curve(curve: dict[str, Any]) -> None:
    """Figures by number of rows, and what is expected beyond."""
    rows = [
        [str(point["rows"]), *(f"{point[k]['mean']:.3g} ± {point[k]['error']:.2g}" for k in point if k != "rows"), ""]
        for point in curve["points"]
    ]
    names = [key for key in curve["points"][0] if key != "rows"]
    beyond = curve.get("expected", [])
    rows += [[str(point["rows"]), *("" for _ in names), f"{point['personal']:.3g}"] for point in beyond]
    columns = ("rows", *names, "expected, personal")
    print_table(Console(), f"{curve['metric']} by number of its rows, on rows that were held out", columns, rows)
    print(f"expected   {curve['sentence']}")


def unit(metric: str) -> str:
    return " %" if metric == "accuracy" else ""


def _print_clients(console: Console, about: dict[str, Any], results: dict[str, Any]) -> None:
    from fedtailor.studies.result_tables import number

    figures: dict[str, list[float]] = results["last"]["clients"]
    if any(len(each) != len(about["clients"]) for each in figures.values()):
        raise RunError("results.json: a figure for each client of the last round is needed", code="run.damaged")
    rows = [
        [client, str(samples), *(number(m, each[i]) for m, each in figures.items())]
        for i, (client, samples) in enumerate(zip(about["clients"], about["train_samples"], strict=True))
    ]
    print_table(console, "clients, last round", ("client", "training samples", *(f"test {m}" for m in figures)), rows)


def print_weights(console: Console, path: Path) -> bool:
    """Weights in the average, rounds by clients; says whether the algorithm tells any."""
    from fedtailor.studies.explain import WEIGHTS, weights

    by_round = weights(path)
    if not by_round:
        return False
    clients = list(dict.fromkeys(client for row in by_round.values() for client in row))
    rounds = [r for i, r in enumerate(by_round) if i in (0, len(by_round) - 1) or i % -(-len(by_round) // 20) == 0]
    rows = [[str(r), *(f"{by_round[r][c]:.3f}" if c in by_round[r] else "-" for c in clients)] for r in rounds]
    print_table(console, "weight of each client in the average", ("round", *clients), rows)
    print(f"every round: {path / WEIGHTS}")
    return True


def print_shares(console: Console, path: Path, data_root: Path | None) -> None:
    """Clients by parts of the model."""
    from fedtailor.studies.explain import SHARES, explain

    names, shares, degrees = explain(path, data_root)
    titles = {
        "share of the common model: 0 own, 1 common": (shares, ".2f"),
        "effective degree Lambda": (degrees, ".3g"),
    }
    for title, (rows, form) in titles.items():
        if rows:
            table = [["client", *names]]
            table += [[client, *(f"{row[name]:{form}}" for name in names)] for client, row in rows.items()]
            if len(names) > len(rows) and _with_frame(_widths(table)) >= console.width:
                table = [list(row) for row in zip(*table, strict=True)]
                table[0][0] = "part"
            print_table(console, title, table[0], table[1:])
    print(f"every parameter: {path / SHARES}")


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items())


def download_with_progress(console: Console, name: str, root: Path | None) -> None:
    """Fetch the files of a data source, with a bar for each."""
    from fedtailor.data.download import fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def listen(file: str, received: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(file, total=total)
            progress.update(tasks[file], completed=received, total=total)

        paths = fetch(name, root, progress=listen)
    for path in paths:
        print(path)


def _reason(why: str | None) -> str:
    """In brackets, of what was not chosen by a person."""
    return "" if why in (None, "chosen") else f" ({why})"
