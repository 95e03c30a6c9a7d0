"""The table and the charts of a task: algorithms that were trained on the same data, beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from statistics import mean

from fedtailor.report.figures import SPLITS, percent, thinned
from fedtailor.report.formatting import label, signed, value
from fedtailor.report.page_model import Cell, Chart, Table, Value
from fedtailor.report.reading import Recorded, gains, known
from fedtailor.studies.compare import Row, rows
from fedtailor.studies.grid import Cell as GridCell
from fedtailor.studies.result_tables import cells_of, header, size

MOST_DOTS = 6000  # clients in the chart of gains


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


def table(task: Task) -> Table:
    """All rows and columns of the comparison."""
    rows = task.rows
    cell_rows = [tuple(map(Cell, cells_of(row), sort_keys(row))) for row in rows]
    title = "All algorithms" + (f", {task.name}" if task.name else "")
    return Table(f"{title}: mean ± spread over seeds", tuple(header(rows)), cell_rows, sortable=True)


def sort_keys(row: Row) -> list[Value]:
    """The numbers behind the cells of a row."""
    figures = [row.last[0], row.selected[0], row.client_std, row.worst_tenth, row.hurt]
    return [row.label, *(x if math.isfinite(x) else None for x in (*figures, *astuple(row.cost)))]


def traffic(task: Task, suffix: str) -> Chart | None:
    """What an algorithm reaches and what it costs."""
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


def learning(task: Task, suffix: str) -> Chart | None:
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
            rows += [(name, round, mean(means), len(means)) for round, means in thinned(sorted(rounds.items()), 400)]
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


def fairness(task: Task, suffix: str) -> Chart | None:
    """How the worst tenth of the clients fares."""
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


def hurt(task: Task, suffix: str) -> Chart | None:
    """Clients that would be better off alone."""
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
        + ", ".join(f"{n} {signed(metric, g)}" for n, g in means.items())
        + ".",
        ("algorithm", "seed", "client", "gain"),
        thinned(rows, MOST_DOTS),
        {"x": "gain", "series": "algorithm", "name": "client", "diverging": True, "percent": percent(metric, "gain")}
        | {"xlabel": f"gain in {metric}" + (" (points)" if metric == "accuracy" else "")},
        "Clients of all seeds; right of zero they are better off than alone. The short line is the mean.",
    )
