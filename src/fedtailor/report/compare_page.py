"""The page on a folder of runs: a comparison, or a published table run again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fedtailor.errors import RunError, UserError
from fedtailor.report.content import Cell, Chart, Figure, Page, Section, Table, Value, cells
from fedtailor.report.figures import SPLITS, percent, thinned
from fedtailor.report.reading import Recorded, gains, known, recorded, split_name
from fedtailor.report.words import count, duration, label, signed, value
from fedtailor.runs.compare import GRID, TABLE, Row, rows
from fedtailor.runs.grid import Cell as GridCell
from fedtailor.runs.grid import folder_name
from fedtailor.runs.store import ABOUT
from fedtailor.runs.tables import cells_of, header, size

MOST_DOTS = 6000  # clients in the chart of gains
FREE = ("algorithm", "local", "seed", "federation", "checkpoint", "tracking")  # may differ between runs of one task


@dataclass(frozen=True)
class Task:
    """Runs that may be compared: the same data, environment and rounds."""

    name: str  # what it has that the others have not; empty if it is the only one
    runs: Mapping[str, Mapping[int, Recorded]]  # label -> seed -> run

    @property
    def all(self) -> list[Recorded]:
        return [run for seeds in self.runs.values() for run in seeds.values()]

    @property
    def rows(self) -> list[Row]:
        """The table; finished runs only."""
        grid = [
            GridCell(name, seed, run.path, run.config) for name, by in self.runs.items() for seed, run in by.items()
        ]
        return rows(grid)


def compare_page(path: Path) -> Page:
    """Everything that is known of a folder of runs, task by task."""
    found, failed = runs_in(path)
    if not found:
        raise RunError(f"{path}: no run in it can be read" + (f"; the first: {failed[0]}" if failed else ""))
    tasks = tasks_of(found, places(path, found))
    sections = [summary(found, tasks, failed)]
    for number, task in enumerate(tasks):
        sections += task_sections(task, f"-{number}" if number else "")
    sections += [*printed(path), configuration(tasks), citations(found)]
    done = sum(run.results is not None for run in found)
    finished = done == len(found)
    state = f"{'finished' if finished else 'not finished'}: {done} of {count(len(found), 'run')}"
    names = ", ".join(dict.fromkeys(run.about["data"] for run in found))
    return Page(f"{path.resolve().name}: {names}", "Comparison", state, finished, tuple(sections), path.resolve().name)


def runs_in(path: Path) -> tuple[list[Recorded], list[str]]:
    """The runs of a folder, and why others cannot be read."""
    found, failed = [], []
    for about in sorted(path.glob(f"*/{ABOUT}")):
        try:
            found.append(recorded(about.parent))
        except (UserError, OSError, KeyError) as error:
            failed.append(" ".join(str(error).splitlines()))
    return found, failed


@dataclass(frozen=True)
class Place:
    """Where a run stands in its table."""

    label: str
    column: str  # of a published table; empty in a comparison
    seed: int


def places(path: Path, found: Sequence[Recorded]) -> dict[Path, Place]:
    """Rows, columns and seeds, from the names of folders and the words in the table that was written of them."""
    names, columns = written(path)
    stems = {run.path: split_name(run.path.name) or (run.path.name, run.config.seed) for run in found}
    out = {}
    for where, (stem, seed) in stems.items():
        column = next((c for c in columns if stem.endswith(f"_{as_folder(c)}")), "")
        row = stem.removesuffix(f"_{as_folder(column)}") if column else stem
        out[where] = Place(next((n for n in names if as_folder(n) == row), row), column, seed)
    return _titled(found, out)


def _titled(found: Sequence[Recorded], given: dict[Path, Place]) -> dict[Path, Place]:
    """The algorithm's title for labels that are only its name, or the only ones of the algorithm."""
    labels: dict[str, set[str]] = {}
    for run in found:
        labels.setdefault(run.title, set()).add(given[run.path].label)
    out = {}
    for run in found:
        place = given[run.path]
        known_name = place.label in (as_folder(run.title), run.config.algorithm.name)
        single = len(labels[run.title]) == 1 and place.label == as_folder(place.label)
        label = run.title if known_name or single else " ".join(place.label.replace("_", " ").split())
        out[run.path] = replace(place, label=label)
    return out


def as_folder(words: str) -> str:
    """As words stand in the name of a run's folder."""
    return folder_name(words, 0).removesuffix("-seed0")


def written(path: Path) -> tuple[list[str], list[str]]:
    """Rows and, of a published table, columns in the table that was written."""
    try:
        lines = [line.strip("| ").split(" | ") for line in (path / TABLE).read_text(encoding="utf-8").splitlines()]
    except OSError:
        return [], []
    rows = [line[0].strip() for line in lines[2:] if len(line) > 1]
    published = not (path / GRID).exists()
    return rows, sorted((column.strip() for column in lines[0]), key=len, reverse=True) if published and lines else []


def tasks_of(found: Sequence[Recorded], given: Mapping[Path, Place]) -> list[Task]:
    """Runs by the column they stand in, else by what they were trained on; each task named by what sets it apart."""
    groups: dict[str, dict[str, dict[int, Recorded]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in found:
        place = given[run.path]
        flat = flattened({k: v for k, v in run.config.plain().items() if k in ("data", "environment")})
        key = place.column or json.dumps(flat, sort_keys=True)
        settings[key] = {"table.": place.column} if place.column else flat
        groups.setdefault(key, {}).setdefault(place.label, {})[place.seed] = run
    keys = {k for flat in settings.values() for k in flat}
    apart = sorted(k for k in keys if len({json.dumps(flat.get(k)) for flat in settings.values()}) > 1)
    return [
        Task(", ".join(f"{k.partition('.')[2]} {settings[key][k]}".strip() for k in apart if k in settings[key]), runs)
        for key, runs in sorted(groups.items())
    ]


def flattened(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots."""
    out: dict[str, Any] = {}
    for key, inner in tables.items():
        out |= flattened(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return out


def summary(found: Sequence[Recorded], tasks: Sequence[Task], failed: Sequence[str]) -> Section:
    """In plain words."""
    names = {name for task in tasks for name in task.runs}
    seeds = {seed for task in tasks for by in task.runs.values() for seed in by}
    done = [run for run in found if run.results is not None]
    text = [
        f"{count(len(names), 'algorithm')} on {count(len(tasks), 'task')} with {count(len(seeds), 'seed')}: "
        f"{len(done)} of {count(len(found), 'run')} finished.",
        *(best(task) for task in tasks if task.rows),
    ]
    if failed:
        text.append(f"{count(len(failed), 'run')} cannot be read and are left out; the first: {failed[0]}.")
    seconds = sum(line["seconds"] for run in found for line in run.lines)
    figures = (
        Figure("Runs", f"{len(done)} of {len(found)}", "finished"),
        Figure("Clients", " / ".join(sorted({f"{len(run.clients)}" for run in found}, key=int)), "of each run"),
        Figure("Time", duration(seconds), "all runs together"),
    )
    return Section("summary", "Summary", tuple(text), figures)


def best(task: Task) -> str:
    """Who is first, and who does least harm."""
    table, higher = task.rows, task.all[0].higher
    ranked = sorted((row for row in table if math.isfinite(row.last[0])), key=lambda row: row.last[0], reverse=higher)
    where = f"With {task.name}" if task.name else "In the last round"
    if not ranked:
        return f"{where} no run has test figures."
    first = ranked[0]
    text = f"{where} {first.label} has the best mean test {first.metric}, {value(first.metric, first.last[0])}"
    if len(ranked) > 1:
        text += f", before {ranked[1].label} with {value(first.metric, ranked[1].last[0])}"
    harm = [row for row in table if math.isfinite(row.hurt) and row.label != "Local"]
    if harm:
        least, most = min(harm, key=lambda row: row.hurt), max(harm, key=lambda row: row.hurt)
        text += f". {least.label} leaves the fewest clients worse off than alone ({100 * least.hurt:.0f} %)"
        text += f", {most.label} the most ({100 * most.hurt:.0f} %)" if most.hurt > least.hurt else ""
    return text + "."


def task_sections(task: Task, suffix: str) -> list[Section]:
    """Table and charts of a task."""
    title = task.name or "Results"
    units = tuple(filter(None, [task.all[0].units]))
    if not task.rows:
        curves = learning(task, suffix)
        if curves is None:
            return [Section(f"task{suffix}", title, missing="no run on it is finished")]
        return [Section(f"task{suffix}", title, ("No run is finished yet.", *units), charts=(curves,))]
    charts = [traffic(task, suffix), learning(task, suffix), fairness(task, suffix), hurt(task, suffix)]
    there = [chart for chart in charts if chart is not None]
    first = Section(f"task{suffix}", title, units, charts=tuple(there), tables=(table(task),), tables_first=True)
    gain = gain_chart(task, suffix)
    ending = f": {task.name}" if task.name else ""
    if gain is None:
        why = "there is no finished run of Local with the same seeds"
        return [first, Section(f"gain{suffix}", f"Gain over Local{ending}", missing=why)]
    return [first, Section(f"gain{suffix}", f"Gain over Local{ending}", units, charts=(gain,))]


def table(task: Task) -> Table:
    """All rows and columns of the comparison."""
    found = task.rows
    shown = [tuple(map(Cell, cells_of(row), sort_keys(row))) for row in found]
    title = "All algorithms" + (f", {task.name}" if task.name else "")
    return Table(f"{title}: mean ± spread over seeds", tuple(header(found)), shown, sortable=True)


def sort_keys(row: Row) -> list[Value]:
    """The numbers behind the cells of a row."""
    figures = [row.last[0], row.selected[0], row.client_std, row.worst_tenth, row.hurt, row.up, row.down, row.trips]
    return [row.label, *(x if math.isfinite(x) else None for x in [*figures, row.seconds])]


def traffic(task: Task, suffix: str) -> Chart | None:
    """What an algorithm reaches and what it costs."""
    found = [row for row in task.rows if math.isfinite(row.last[0]) and row.up + row.down > 0]
    if not found:
        return None
    metric = found[0].metric
    return Chart(
        f"traffic{suffix}",
        "scatter",
        f"Test {metric} against bytes",
        "One dot per algorithm: "
        + "; ".join(f"{r.label} {value(metric, r.last[0])} for {size(r.up + r.down)}" for r in found)
        + ".",
        ("algorithm", "bytes", metric),
        [(r.label, r.up + r.down, r.last[0]) for r in found],
        {"x": "bytes", "y": metric, "name": "algorithm", "labels": True, "bytes": True, "xlabel": "bytes, both ways"}
        | {"ylabel": f"test {label(metric)}", "percent": percent(metric, metric)},
        "Last round; bytes of a whole run.",
    )


def learning(task: Task, suffix: str) -> Chart | None:
    """Curves of all algorithms, mean over clients and seeds."""
    run = task.all[0]
    for split in SPLITS:
        rows: list[tuple[Value, ...]] = []
        for name, by in task.runs.items():
            rounds: dict[int, list[float]] = {}
            for one in by.values():
                for round, values in one.measured(split, run.metric):
                    if there := known(values):
                        rounds.setdefault(round, []).append(mean(there))
            rows += [(name, round, mean(found), len(found)) for round, found in thinned(sorted(rounds.items()), 400)]
        if rows:
            break
    else:
        return None
    last = {str(name): figure for name, _, figure, _ in rows}
    told = ", ".join(f"{name} {value(run.metric, float(figure or 0))}" for name, figure in last.items())
    return Chart(
        f"learning{suffix}",
        "lines",
        f"{SPLITS[split].capitalize()} {run.metric} by round",
        f"Line chart, one line per algorithm; at its end: {told}.",
        ("algorithm", "round", run.metric, "seeds"),
        rows,
        {"x": "round", "y": run.metric, "series": "algorithm", "ylabel": label(run.metric)}
        | {"percent": percent(run.metric, run.metric)},
        "Mean over clients and seeds.",
    )


def fairness(task: Task, suffix: str) -> Chart | None:
    """How the worst tenth of the clients fares."""
    found = [row for row in task.rows if math.isfinite(row.worst_tenth)]
    if not found:
        return None
    found.sort(key=lambda row: row.worst_tenth, reverse=task.all[0].higher)
    metric = found[0].metric
    return Chart(
        f"worst{suffix}",
        "bars",
        f"Test {metric} of the worst tenth",
        "One bar per algorithm, best first: "
        + ", ".join(f"{r.label} {value(metric, r.worst_tenth)}" for r in found)
        + ".",
        ("algorithm", "worst tenth", "mean"),
        [(r.label, r.worst_tenth, r.last[0]) for r in found],
        {"x": "worst tenth", "name": "algorithm", "percent": percent(metric, "worst tenth", "mean")}
        | {"xlabel": f"{label(metric)} of the worst tenth"},
        "Mean of the tenth of the clients with the poorest figures.",
    )


def hurt(task: Task, suffix: str) -> Chart | None:
    """Clients that would be better off alone."""
    found = sorted((row for row in task.rows if math.isfinite(row.hurt)), key=lambda row: row.hurt)
    if len(found) < 2:
        return None
    return Chart(
        f"hurt{suffix}",
        "bars",
        "Clients hurt",
        "One bar per algorithm: " + ", ".join(f"{r.label} {100 * r.hurt:.0f} %" for r in found) + ".",
        ("algorithm", "hurt"),
        [(r.label, r.hurt) for r in found],
        {"x": "hurt", "name": "algorithm", "percent": ["hurt"], "xlabel": "clients worse off than alone (%)"},
        "Share of the clients that Local serves better.",
    )


def gain_chart(task: Task, suffix: str) -> Chart | None:
    """Every client of every seed against itself alone."""
    alone = {
        seed: run
        for by in task.runs.values()
        for seed, run in by.items()
        if run.config.algorithm.name == "local" and run.results is not None
    }
    rows: list[tuple[Value, ...]] = []
    for name, by in task.runs.items():
        for seed, run in by.items():
            if run.results is None or seed not in alone or run.config.algorithm.name == "local":
                continue
            if run.clients != alone[seed].clients:
                continue
            found = gains(run.tested, alone[seed].tested, run.higher)
            rows += [(name, seed, c, g) for c, g in zip(run.clients, found, strict=True) if math.isfinite(g)]
    if not rows:
        return None
    metric = task.all[0].metric
    means = {name: mean(float(r[3] or 0) for r in rows if r[0] == name) for name in dict.fromkeys(r[0] for r in rows)}
    return Chart(
        f"gains{suffix}",
        "dots",
        "Gain of each client over Local",
        "One dot per client and seed; mean gain: "
        + ", ".join(f"{n} {signed(metric, g)}" for n, g in means.items())
        + ".",
        ("algorithm", "seed", "client", "gain"),
        thinned(rows, MOST_DOTS),
        {"x": "gain", "series": "algorithm", "name": "client", "diverging": True, "percent": percent(metric, "gain")}
        | {"xlabel": f"gain in {metric}" + (" (points)" if metric == "accuracy" else "")},
        "Clients of all seeds; right of zero they are better off than alone. The short line is the mean.",
    )


def printed(path: Path) -> list[Section]:
    """The table of a published one, with the paper's figures; a comparison's is above."""
    if (path / GRID).exists() or not (path / TABLE).is_file():
        return []
    text = (path / TABLE).read_text(encoding="utf-8")
    return [Section("printed", "Table as printed", code=((TABLE, text),))]


def configuration(tasks: Sequence[Task]) -> Section:
    """What all runs have in common, from the first."""
    run = tasks[0].all[0]
    common = {k: v for k, v in flattened(run.config.plain()).items() if k.partition(".")[0] not in FREE}
    rows = [cells(key, json.dumps(setting, ensure_ascii=False)) for key, setting in common.items()]
    note = "Common to the runs" if len(tasks) == 1 else f"Of the first task, {tasks[0].name}"
    return Section("configuration", "Configuration", tables=(Table(note, ("", ""), rows, words=True),))


def citations(found: Sequence[Recorded]) -> Section:
    """BibTeX of every algorithm."""
    kinds = {run.title: run.kind for run in found}
    texts = dict.fromkeys(kind.citation.strip() for kind in kinds.values() if kind is not None and kind.citation)
    missing = "" if texts else "the algorithms name no papers"
    return Section("citation", "Citation", code=(("BibTeX", "\n\n".join(texts)),) if texts else (), missing=missing)
