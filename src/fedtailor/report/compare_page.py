"""The page on a folder of runs: a comparison, or a published table run again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fedtailor.errors import RunError, UserError
from fedtailor.experiments.store import ABOUT, CONFIG, METRICS
from fedtailor.report.formatting import count, duration, format_gain, label, percent, thin, value
from fedtailor.report.page import Chart, KeyFigure, Page, PageSection, PageTable, TableCell, Value, cells
from fedtailor.report.recorded_run import RecordedRun, gains, known, read_run, split_name
from fedtailor.report.run_page import SPLITS
from fedtailor.studies import result_tables
from fedtailor.studies.compare import GRID, TABLE, Row, rows
from fedtailor.studies.grid import Cell as GridCell
from fedtailor.studies.grid import folder_name
from fedtailor.studies.result_tables import cells_of, header, size

FREE = ("algorithm", "local", "seed", "federation", "checkpoint", "tracking")  # may differ between runs of one task
MOST_DOTS = 6000  # clients in the chart of gains


@dataclass(frozen=True)
class ComparedTask:
    """Runs that may be compared: the same data, environment and rounds."""

    name: str  # what distinguishes it from the others; empty if it is the only one
    runs: Mapping[str, Mapping[int, RecordedRun]]  # label -> seed -> run

    @property
    def all(self) -> list[RecordedRun]:
        return [run for seeds in self.runs.values() for run in seeds.values()]

    @property
    def rows(self) -> list[Row]:
        """The table; finished runs only."""
        grid = [
            GridCell(name, seed, run.path, run.config) for name, by in self.runs.items() for seed, run in by.items()
        ]
        return rows(grid)


@dataclass(frozen=True)
class TablePlace:
    """The row, column and seed of a run in its table."""

    label: str
    column: str  # of a published table; empty in a comparison
    seed: int


def compare_page(path: Path) -> Page:
    """A comparison's page: a summary, then tables and charts task by task."""
    runs, failed = runs_in(path)
    if not runs:
        raise RunError(f"{path}: no run in it can be read" + (f"; the first: {failed[0]}" if failed else ""))
    tasks = tasks_of(runs, places(path, runs))
    sections = [summary(runs, tasks, failed)]
    for number, task in enumerate(tasks):
        sections += task_sections(task, f"-{number}" if number else "")
    sections += [*printed_table(path), configuration(tasks), citations(runs)]
    done = sum(run.results is not None for run in runs)
    finished = done == len(runs)
    state = f"{'finished' if finished else 'not finished'}: {done} of {count(len(runs), 'run')}"
    names = ", ".join(dict.fromkeys(run.about["data"] for run in runs))
    return Page(f"{path.resolve().name}: {names}", "Comparison", state, finished, tuple(sections), path.resolve().name)


def runs_in(path: Path) -> tuple[list[RecordedRun], list[str]]:
    """The runs of a folder, and why others cannot be read."""
    runs, failed = [], []
    for folder in sorted({file.parent for name in (ABOUT, CONFIG) for file in path.glob(f"*/{name}")}):
        try:
            run = read_run(folder)
            if run.unreadable:
                raise RunError(f"{run.path / METRICS}: {count(run.unreadable, 'line')} cannot be read")
            runs.append(run)
        except (UserError, OSError, KeyError) as error:
            failed.append(" ".join(str(error).splitlines()))
    return runs, failed


def left_out(failed: Sequence[str]) -> list[str]:
    """A sentence on runs that cannot be read, if there are any."""
    sentence = f"{count(len(failed), 'run')} cannot be read and {'is' if len(failed) == 1 else 'are'} left out"
    return [f"{sentence}; the first: {failed[0]}."] if failed else []


def places(path: Path, runs: Sequence[RecordedRun]) -> dict[Path, TablePlace]:
    """Rows, columns and seeds, from the names of folders and the words in the table that was written of them."""
    names, columns = written(path)
    stems = {run.path: split_name(run.path.name) or (run.path.name, run.config.seed) for run in runs}
    out = {}
    for where, (stem, seed) in stems.items():
        column = next((c for c in columns if stem.endswith(f"_{as_folder(c)}")), "")
        row = stem.removesuffix(f"_{as_folder(column)}") if column else stem
        out[where] = TablePlace(next((n for n in names if as_folder(n) == row), row), column, seed)
    return _use_titles(runs, out)


def _use_titles(runs: Sequence[RecordedRun], by_path: dict[Path, TablePlace]) -> dict[Path, TablePlace]:
    """The algorithm's title for labels that are only its name, or the only ones of the algorithm."""
    labels: dict[str, set[str]] = {}
    for run in runs:
        labels.setdefault(run.title, set()).add(by_path[run.path].label)
    out = {}
    for run in runs:
        place = by_path[run.path]
        known_name = place.label in (as_folder(run.title), run.config.algorithm.name)
        single = len(labels[run.title]) == 1 and place.label == as_folder(place.label)
        label = run.title if known_name or single else " ".join(place.label.replace("_", " ").split())
        out[run.path] = replace(place, label=label)
    return out


def as_folder(words: str) -> str:
    """Words as they appear in the name of a run's folder."""
    return folder_name(words, 0).removesuffix("-seed0")


def written(path: Path) -> tuple[list[str], list[str]]:
    """The rows of the table that was written and, of a published one, its columns."""
    if not (path / TABLE).is_file():
        return [], []
    lines = [line.strip("| ").split(" | ") for line in result_tables.read(path, TABLE).splitlines()]
    rows = [line[0].strip() for line in lines[2:] if len(line) > 1]
    published = not (path / GRID).exists()
    return rows, sorted((column.strip() for column in lines[0]), key=len, reverse=True) if published and lines else []


def tasks_of(recorded_runs: Sequence[RecordedRun], by_path: Mapping[Path, TablePlace]) -> list[ComparedTask]:
    """Runs by the column they stand in, else by what they were trained on; each task named by what sets it apart."""
    groups: dict[str, dict[str, dict[int, RecordedRun]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in recorded_runs:
        place = by_path[run.path]
        flat = flatten({k: v for k, v in run.config.plain().items() if k in ("data", "environment")})
        key = place.column or json.dumps(flat, sort_keys=True)
        settings[key] = {"table.": place.column} if place.column else flat
        groups.setdefault(key, {}).setdefault(place.label, {})[place.seed] = run
    keys = {k for flat in settings.values() for k in flat}
    varying = sorted(k for k in keys if len({json.dumps(flat.get(k)) for flat in settings.values()}) > 1)
    return [
        ComparedTask(
            ", ".join(f"{k.partition('.')[2]} {settings[key][k]}".strip() for k in varying if k in settings[key]), runs
        )
        for key, runs in sorted(groups.items())
    ]


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, its keys joined by dots."""
    out: dict[str, Any] = {}
    for key, inner in tables.items():
        out |= flatten(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return out


def summary(runs: Sequence[RecordedRun], tasks: Sequence[ComparedTask], failed: Sequence[str]) -> PageSection:
    names = {name for task in tasks for name in task.runs}
    seeds = {seed for task in tasks for by in task.runs.values() for seed in by}
    done = [run for run in runs if run.results is not None]
    text = [
        f"{count(len(names), 'algorithm')} on {count(len(tasks), 'task')} with {count(len(seeds), 'seed')}: "
        f"{len(done)} of {count(len(runs), 'run')} finished.",
        *(best(task) for task in tasks if task.rows),
    ]
    text += left_out(failed)
    seconds = sum(line["seconds"] for run in runs for line in run.lines)
    figures = (
        KeyFigure("Runs", f"{len(done)} of {len(runs)}", "finished"),
        KeyFigure("Clients", " / ".join(sorted({f"{len(run.clients)}" for run in runs}, key=int)), "of each run"),
        KeyFigure("Time", duration(seconds), "all runs together"),
    )
    return PageSection("summary", "Summary", tuple(text), figures)


def best(task: ComparedTask) -> str:
    """Which algorithm is best on average, and which leaves fewest clients worse off."""
    table, higher = task.rows, task.all[0].higher
    ranked = sorted((row for row in table if math.isfinite(row.last[0])), key=lambda row: row.last[0], reverse=higher)
    where = f"With {task.name}" if task.name else "In the last round"
    if not ranked:
        return f"{where} no run has test figures."
    first = ranked[0]
    text = f"{where} {first.label} has the best mean test {first.metric}, {value(first.metric, first.last[0])}"
    if len(ranked) > 1:
        text += f", ahead of {ranked[1].label} with {value(first.metric, ranked[1].last[0])}"
    harm = [row for row in table if math.isfinite(row.hurt) and row.label != "Local"]
    if harm:
        least, most = min(harm, key=lambda row: row.hurt), max(harm, key=lambda row: row.hurt)
        text += f". {least.label} leaves the fewest clients worse off than alone ({100 * least.hurt:.0f} %)"
        text += f", {most.label} the most ({100 * most.hurt:.0f} %)" if most.hurt > least.hurt else ""
    return text + "."


def task_sections(task: ComparedTask, suffix: str) -> list[PageSection]:
    title = task.name or "Results"
    units = tuple(filter(None, [task.all[0].units]))
    if not task.rows:
        curves = learning(task, suffix)
        if curves is None:
            return [PageSection(f"task{suffix}", title, missing="no run on it is finished")]
        return [PageSection(f"task{suffix}", title, ("No run is finished yet.", *units), charts=(curves,))]
    charts = [traffic(task, suffix), learning(task, suffix), fairness(task, suffix), hurt(task, suffix)]
    drawn = [chart for chart in charts if chart is not None]
    first = PageSection(f"task{suffix}", title, units, charts=tuple(drawn), tables=(table(task),), tables_first=True)
    gain = gain_chart(task, suffix)
    ending = f": {task.name}" if task.name else ""
    if gain is None:
        why = "there is no finished run of Local with the same seeds"
        return [first, PageSection(f"gain{suffix}", f"Gain over Local{ending}", missing=why)]
    return [first, PageSection(f"gain{suffix}", f"Gain over Local{ending}", units, charts=(gain,))]


def table(task: ComparedTask) -> PageTable:
    """All rows and columns of the comparison."""
    rows = task.rows
    cell_rows = [tuple(map(TableCell, cells_of(row), sort_keys(row))) for row in rows]
    title = "All algorithms" + (f", {task.name}" if task.name else "")
    return PageTable(f"{title}: mean ± spread over seeds", tuple(header(rows)), cell_rows, sortable=True)


def sort_keys(row: Row) -> list[Value]:
    """The numbers behind the cells of a row."""
    figures = [row.last[0], row.selected[0], row.client_std, row.worst_tenth, row.hurt]
    return [row.label, *(x if math.isfinite(x) else None for x in (*figures, *astuple(row.cost)))]


def traffic(task: ComparedTask, suffix: str) -> Chart | None:
    """Test figure against bytes, one dot per algorithm."""
    rows = [row for row in task.rows if math.isfinite(row.last[0]) and row.cost.bytes > 0]
    if not rows:
        return None
    metric = rows[0].metric
    return Chart(
        f"traffic{suffix}",
        "scatter",
        f"Test {metric} against bytes",
        "One dot per algorithm: "
        + "; ".join(f"{r.label} {value(metric, r.last[0])} for {size(r.cost.bytes)}" for r in rows)
        + ".",
        ("algorithm", "bytes", metric),
        [(r.label, r.cost.bytes, r.last[0]) for r in rows],
        {"x": "bytes", "y": metric, "name": "algorithm", "labels": True, "bytes": True, "xlabel": "bytes, both ways"}
        | {"ylabel": f"test {label(metric)}", "percent": percent(metric, metric)},
        "Last round; bytes of a whole run.",
    )


def learning(task: ComparedTask, suffix: str) -> Chart | None:
    """Curves of all algorithms, mean over clients and seeds."""
    run = task.all[0]
    for split in SPLITS:
        rows: list[tuple[Value, ...]] = []
        for name, by in task.runs.items():
            rounds: dict[int, list[float]] = {}
            for one in by.values():
                for round, values in one.measured(split, run.metric):
                    if finite := known(values):
                        rounds.setdefault(round, []).append(mean(finite))
            rows += [(name, round, mean(means), len(means)) for round, means in thin(sorted(rounds.items()), 400)]
        if rows:
            break
    else:
        return None
    last = {str(name): figure for name, _, figure, _ in rows}
    ends = ", ".join(f"{name} {value(run.metric, float(figure or 0))}" for name, figure in last.items())
    return Chart(
        f"learning{suffix}",
        "lines",
        f"{SPLITS[split].capitalize()} {run.metric} by round",
        f"Line chart, one line per algorithm; at its end: {ends}.",
        ("algorithm", "round", run.metric, "seeds"),
        rows,
        {"x": "round", "y": run.metric, "series": "algorithm", "ylabel": label(run.metric)}
        | {"percent": percent(run.metric, run.metric)},
        "Mean over clients and seeds.",
    )


def fairness(task: ComparedTask, suffix: str) -> Chart | None:
    """The worst tenth of the clients, one bar per algorithm."""
    rows = [row for row in task.rows if math.isfinite(row.worst_tenth)]
    if not rows:
        return None
    rows.sort(key=lambda row: row.worst_tenth, reverse=task.all[0].higher)
    metric = rows[0].metric
    return Chart(
        f"worst{suffix}",
        "bars",
        f"Test {metric} of the worst tenth",
        "One bar per algorithm, best first: "
        + ", ".join(f"{r.label} {value(metric, r.worst_tenth)}" for r in rows)
        + ".",
        ("algorithm", "worst tenth", "mean"),
        [(r.label, r.worst_tenth, r.last[0]) for r in rows],
        {"x": "worst tenth", "name": "algorithm", "percent": percent(metric, "worst tenth", "mean")}
        | {"xlabel": f"{label(metric)} of the worst tenth"},
        "Mean of the tenth of the clients with the poorest figures.",
    )


def hurt(task: ComparedTask, suffix: str) -> Chart | None:
    """Share of clients worse off than alone, one bar per algorithm."""
    rows = sorted((row for row in task.rows if math.isfinite(row.hurt)), key=lambda row: row.hurt)
    if len(rows) < 2:
        return None
    return Chart(
        f"hurt{suffix}",
        "bars",
        "Clients hurt",
        "One bar per algorithm: " + ", ".join(f"{r.label} {100 * r.hurt:.0f} %" for r in rows) + ".",
        ("algorithm", "hurt"),
        [(r.label, r.hurt) for r in rows],
        {"x": "hurt", "name": "algorithm", "percent": ["hurt"], "xlabel": "clients worse off than alone (%)"},
        "Share of clients for which Local is better.",
    )


def gain_chart(task: ComparedTask, suffix: str) -> Chart | None:
    """Gain of every client and seed over Local."""
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
            each = gains(run.tested, alone[seed].tested, run.higher)
            rows += [(name, seed, c, g) for c, g in zip(run.clients, each, strict=True) if math.isfinite(g)]
    if not rows:
        return None
    metric = task.all[0].metric
    means = {name: mean(float(r[3] or 0) for r in rows if r[0] == name) for name in dict.fromkeys(r[0] for r in rows)}
    return Chart(
        f"gains{suffix}",
        "dots",
        "Gain of each client over Local",
        "One dot per client and seed; mean gain: "
        + ", ".join(f"{n} {format_gain(metric, g)}" for n, g in means.items())
        + ".",
        ("algorithm", "seed", "client", "gain"),
        thin(rows, MOST_DOTS),
        {"x": "gain", "series": "algorithm", "name": "client", "diverging": True, "percent": percent(metric, "gain")}
        | {"xlabel": f"gain in {metric}" + (" (points)" if metric == "accuracy" else "")},
        "Clients of all seeds; right of zero they are better off than alone. The short line is the mean.",
    )


def printed_table(path: Path) -> list[PageSection]:
    """A published table with the paper's figures; of a comparison none, its table is above."""
    if (path / GRID).exists() or not (path / TABLE).is_file():
        return []
    text = result_tables.read(path, TABLE)
    return [PageSection("printed", "PageTable as printed", code=((TABLE, text),))]


def configuration(tasks: Sequence[ComparedTask]) -> PageSection:
    """What all runs have in common, from the first."""
    run = tasks[0].all[0]
    common = {k: v for k, v in flatten(run.config.plain()).items() if k.partition(".")[0] not in FREE}
    rows = [cells(key, json.dumps(setting, ensure_ascii=False)) for key, setting in common.items()]
    note = "Common to the runs" if len(tasks) == 1 else f"Of the first task, {tasks[0].name}"
    return PageSection("configuration", "Configuration", tables=(PageTable(note, ("", ""), rows, words=True),))


def citations(runs: Sequence[RecordedRun]) -> PageSection:
    kinds = {run.title: run.kind for run in runs}
    texts = dict.fromkeys(kind.citation.strip() for kind in kinds.values() if kind is not None and kind.citation)
    missing = "" if texts else "the algorithms name no papers"
    return PageSection("citation", "Citation", code=(("BibTeX", "\n\n".join(texts)),) if texts else (), missing=missing)
