"""The page on a folder of runs: a comparison, or a published table run again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError, UserError
from fedtailor.experiments.store import ABOUT, CONFIG, METRICS
from fedtailor.report.formatting import count, duration, value
from fedtailor.report.page_model import Figure, Page, Section, Table, cells
from fedtailor.report.reading import Recorded, recorded, split_name
from fedtailor.report.task_charts import Task, fairness, gain_chart, hurt, learning, table, traffic
from fedtailor.studies import result_tables
from fedtailor.studies.compare import GRID, TABLE
from fedtailor.studies.grid import folder_name

FREE = ("algorithm", "local", "seed", "federation", "checkpoint", "tracking")  # may differ between runs of one task


def compare_page(path: Path) -> Page:
    """Everything that is known of a folder of runs, task by task."""
    runs, failed = runs_in(path)
    if not runs:
        raise RunError(f"{path}: no run in it can be read" + (f"; the first: {failed[0]}" if failed else ""))
    tasks = tasks_of(runs, places(path, runs))
    sections = [summary(runs, tasks, failed)]
    for number, task in enumerate(tasks):
        sections += task_sections(task, f"-{number}" if number else "")
    sections += [*printed(path), configuration(tasks), citations(runs)]
    done = sum(run.results is not None for run in runs)
    finished = done == len(runs)
    state = f"{'finished' if finished else 'not finished'}: {done} of {count(len(runs), 'run')}"
    names = ", ".join(dict.fromkeys(run.about["data"] for run in runs))
    return Page(f"{path.resolve().name}: {names}", "Comparison", state, finished, tuple(sections), path.resolve().name)


def runs_in(path: Path) -> tuple[list[Recorded], list[str]]:
    """The runs of a folder, and why others cannot be read."""
    runs, failed = [], []
    for folder in sorted({file.parent for name in (ABOUT, CONFIG) for file in path.glob(f"*/{name}")}):
        try:
            run = recorded(folder)
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


@dataclass(frozen=True)
class Place:
    """Where a run stands in its table."""

    label: str
    column: str  # of a published table; empty in a comparison
    seed: int


def places(path: Path, runs: Sequence[Recorded]) -> dict[Path, Place]:
    """Rows, columns and seeds, from the names of folders and the words in the table that was written of them."""
    names, columns = written(path)
    stems = {run.path: split_name(run.path.name) or (run.path.name, run.config.seed) for run in runs}
    out = {}
    for where, (stem, seed) in stems.items():
        column = next((c for c in columns if stem.endswith(f"_{as_folder(c)}")), "")
        row = stem.removesuffix(f"_{as_folder(column)}") if column else stem
        out[where] = Place(next((n for n in names if as_folder(n) == row), row), column, seed)
    return _titled(runs, out)


def _titled(runs: Sequence[Recorded], by_path: dict[Path, Place]) -> dict[Path, Place]:
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
    """As words stand in the name of a run's folder."""
    return folder_name(words, 0).removesuffix("-seed0")


def written(path: Path) -> tuple[list[str], list[str]]:
    """Rows and, of a published table, columns in the table that was written."""
    if not (path / TABLE).is_file():
        return [], []
    lines = [line.strip("| ").split(" | ") for line in result_tables.read(path, TABLE).splitlines()]
    rows = [line[0].strip() for line in lines[2:] if len(line) > 1]
    published = not (path / GRID).exists()
    return rows, sorted((column.strip() for column in lines[0]), key=len, reverse=True) if published and lines else []


def tasks_of(recorded_runs: Sequence[Recorded], by_path: Mapping[Path, Place]) -> list[Task]:
    """Runs by the column they stand in, else by what they were trained on; each task named by what sets it apart."""
    groups: dict[str, dict[str, dict[int, Recorded]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in recorded_runs:
        place = by_path[run.path]
        flat = flattened({k: v for k, v in run.config.plain().items() if k in ("data", "environment")})
        key = place.column or json.dumps(flat, sort_keys=True)
        settings[key] = {"table.": place.column} if place.column else flat
        groups.setdefault(key, {}).setdefault(place.label, {})[place.seed] = run
    keys = {k for flat in settings.values() for k in flat}
    varying = sorted(k for k in keys if len({json.dumps(flat.get(k)) for flat in settings.values()}) > 1)
    return [
        Task(
            ", ".join(f"{k.partition('.')[2]} {settings[key][k]}".strip() for k in varying if k in settings[key]), runs
        )
        for key, runs in sorted(groups.items())
    ]


def flattened(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots."""
    out: dict[str, Any] = {}
    for key, inner in tables.items():
        out |= flattened(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return out


def summary(runs: Sequence[Recorded], tasks: Sequence[Task], failed: Sequence[str]) -> Section:
    """In plain words."""
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
        Figure("Runs", f"{len(done)} of {len(runs)}", "finished"),
        Figure("Clients", " / ".join(sorted({f"{len(run.clients)}" for run in runs}, key=int)), "of each run"),
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
        text += f", ahead of {ranked[1].label} with {value(first.metric, ranked[1].last[0])}"
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
    drawn = [chart for chart in charts if chart is not None]
    first = Section(f"task{suffix}", title, units, charts=tuple(drawn), tables=(table(task),), tables_first=True)
    gain = gain_chart(task, suffix)
    ending = f": {task.name}" if task.name else ""
    if gain is None:
        why = "there is no finished run of Local with the same seeds"
        return [first, Section(f"gain{suffix}", f"Gain over Local{ending}", missing=why)]
    return [first, Section(f"gain{suffix}", f"Gain over Local{ending}", units, charts=(gain,))]


def printed(path: Path) -> list[Section]:
    """The table of a published one, with the paper's figures; a comparison's is above."""
    if (path / GRID).exists() or not (path / TABLE).is_file():
        return []
    text = result_tables.read(path, TABLE)
    return [Section("printed", "Table as printed", code=((TABLE, text),))]


def configuration(tasks: Sequence[Task]) -> Section:
    """What all runs have in common, from the first."""
    run = tasks[0].all[0]
    common = {k: v for k, v in flattened(run.config.plain()).items() if k.partition(".")[0] not in FREE}
    rows = [cells(key, json.dumps(setting, ensure_ascii=False)) for key, setting in common.items()]
    note = "Common to the runs" if len(tasks) == 1 else f"Of the first task, {tasks[0].name}"
    return Section("configuration", "Configuration", tables=(Table(note, ("", ""), rows, words=True),))


def citations(runs: Sequence[Recorded]) -> Section:
    """BibTeX of every algorithm."""
    kinds = {run.title: run.kind for run in runs}
    texts = dict.fromkeys(kind.citation.strip() for kind in kinds.values() if kind is not None and kind.citation)
    missing = "" if texts else "the algorithms name no papers"
    return Section("citation", "Citation", code=(("BibTeX", "\n\n".join(texts)),) if texts else (), missing=missing)
