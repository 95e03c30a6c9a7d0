"""Every method on PFLlib's Fashion-MNIST columns, under three reporting conventions

FEDTAILOR_DATA=... python benchmarks/leaderboard.py [--model dnn] [--runs FOLDER] [--only NAME ...] [--finished]
                   [--json FILE]

The habits: the round that is best on test data, the last round, the round that is best on validation data. A run that
was interrupted is resumed, a finished one is not run again; of its files only the figures are kept. With --finished,
nothing is run: the tables are those of the finished runs. --json writes the rows of all tables to a file too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from fedtailor import algorithms
from fedtailor.core.data import FederatedData
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.building import load, model_of
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import CONFIG, RESULTS, RunFolder
from fedtailor.studies.grid import folder_name

COLUMNS: dict[str, dict[str, Any]] = {
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "two classes per client": {"partition": "classes", "classes_per_client": 2},
}
COMMON: dict[str, Any] = {"evaluation": {"test_curve": True}, "checkpoint": {"seconds": 60}}
NETWORKS: dict[str, dict[str, Any]] = {  # PFLlib's
    "dnn": {
        "rounds": 15,
        "model": {"name": "mlp", "hidden": [100]},
        "local": {"lr": 0.1, "batch_size": 10},
        "federation": {"engine": "vmap"},
    },
    "cnn": {
        "rounds": 10,
        "model": {"name": "cnn"},
        "local": {"lr": 0.05, "batch_size": 10},
        "federation": {"engine": "loop"},
    },
}
DATA = {"source": "fashion-mnist", "clients": 20, "test": 0.25, "val": 0.1, "max_samples": 160, "max_train": 60}
# where a default is more than one local epoch per phase, or more trips than fifteen rounds are worth
OPTIONS: dict[str, dict[str, Any]] = {
    "fedrep": {"head_epochs": 1},
    "learn2pfed-net": {"epochs": 1},
    "duw-fedavg": {"outer_iterations": 1},
    "duw-fednova": {"outer_iterations": 1},
    "fedeq": {"epochs": 1, "head_epochs": 1},
    "fedl2p": {"tune_epochs": 1},
}
HABITS = ("best on test", "last", "selected on validation")


def configured(column: str, name: str, network: str = "dnn") -> RunConfig:
    """One method on one column."""
    algorithm = {"name": name} | OPTIONS.get(name, {})
    return parse(COMMON | NETWORKS[network] | {"data": DATA | COLUMNS[column], "algorithm": algorithm})


def methods(network: str = "dnn") -> list[str]:
    """All that are there and can serve the model, by name."""
    model, out = model_of(configured(next(iter(COLUMNS)), "fedavg", network), (1, 28, 28), 10), []
    for name in algorithms.algorithms():
        try:
            algorithms.make(name, OPTIONS.get(name, {})).check(model, "classification")
        except ConfigError:  # closed forms of linear models; what needs BatchNorm or adapters
            continue
        out.append(name)
    return out


def finished(config: RunConfig, folder: Path, data: FederatedData | None = None) -> RunFolder:
    """The run, to its end; of what it has saved only the figures stay."""
    if not (folder / RESULTS).exists():
        if (folder / CONFIG).exists():
            runner.resume(folder, cores=1, loaded=data)
        else:
            runner.start(config, folder, cores=1, loaded=data)
        for part in [p for p in folder.iterdir() if p.is_dir()]:
            shutil.rmtree(part)
    return RunFolder(folder)


@dataclass(frozen=True)
class Row:
    """A method's accuracy in percent over all test samples, by habit, and what it sent."""

    title: str
    figures: tuple[float, float, float]
    rounds: tuple[int, int, int]
    up: float  # MB


def row(title: str, folder: RunFolder, counts: Sequence[int]) -> Row:
    """From the curve of a run; clients count by their test samples, as in PFLlib."""
    results, lines = folder.results, [line for line in folder.metrics() if "test" in line]
    assert results is not None
    total = sum(counts)
    curve = {
        line["round"]: 100 * sum(n * a for n, a in zip(counts, line["test"]["accuracy"], strict=True) if n) / total
        for line in lines
    }
    best = max(curve, key=lambda r: (curve[r], -r))
    rounds = (best, max(curve), results["selected"]["round"])
    figures = (curve[rounds[0]], curve[rounds[1]], curve[rounds[2]])
    return Row(title, figures, rounds, results["traffic"]["up"] / 1e6)


def ranks(rows: Sequence[Row], habit: int) -> dict[str, int]:
    """1 is best; equal figures have equal ranks."""
    return {a.title: 1 + sum(b.figures[habit] > a.figures[habit] for b in rows) for a in rows}


def turned(rows: Sequence[Row], habit: int, other: int) -> tuple[int, int]:
    """How many pairs of methods are the other way round by another habit, and how many pairs there are."""
    signs = [(a.figures[habit] - b.figures[habit]) * (a.figures[other] - b.figures[other]) for a, b in pairs(rows)]
    return sum(s < 0 for s in signs), len(signs)


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    return list(combinations(rows, 2))


def table(rows: Sequence[Row]) -> list[str]:
    """Figures and ranks side by side, in the order of the round that validation selects."""
    placed = [ranks(rows, habit) for habit in range(3)]
    lines = ["| method | " + " | ".join((*HABITS, "rank", "rank", "rank", "best round", "up, MB")) + " |"]
    lines += ["|---" + "|---:" * 8 + "|"]
    for r in sorted(rows, key=lambda r: (-r.figures[2], r.title)):
        cells = [r.title, *(f"{f:.2f}" for f in r.figures), *(str(p[r.title]) for p in placed)]
        lines.append(f"| {' | '.join([*cells, str(r.rounds[0]), f'{r.up:.0f}'])} |")
    return lines


def summary(rows: Sequence[Row], tests: int) -> list[str]:
    """What the habit of reporting the best test round does, in figures."""
    best, chosen = ranks(rows, 0), ranks(rows, 2)
    gain = {r.title: r.figures[0] - r.figures[2] for r in rows}
    late = {r.title: r.figures[0] - r.figures[1] for r in rows}
    moved = {r.title: abs(best[r.title] - chosen[r.title]) for r in rows}
    most, far = max(gain, key=lambda t: gain[t]), max(moved, key=lambda t: moved[t])
    swapped, of = turned(rows, 0, 2)
    middle = sorted(r.figures[2] for r in rows)[len(rows) // 2] / 100
    return [
        f"- The best test round is {mean(gain.values()):.2f} points above the selected one on average over "
        f"{len(rows)} methods, and {mean(late.values()):.2f} above the last; most for {most}, {gain[most]:.2f}.",
        f"- {swapped} of {of} pairs of methods ({100 * swapped / of:.0f} %) are the other way round; {far} moves by "
        f"{moved[far]} ranks, a method by {mean(moved.values()):.1f} on average.",
        f"- First five by the best test round: {first(best)}. By the selected round: {first(chosen)}.",
        f"- A figure is measured on {tests} test samples: its standard error is about "
        f"{100 * sqrt(middle * (1 - middle) / tests):.1f} points. One seed.",
    ]


def first(placed: dict[str, int]) -> str:
    """Five titles."""
    return ", ".join(sorted(placed, key=lambda title: (placed[title], title))[:5])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(NETWORKS), default="dnn", help="PFLlib's network")
    parser.add_argument("--runs", type=Path, help="folder of the runs; runs/leaderboard-MODEL by default")
    parser.add_argument("--only", nargs="*", default=[], help="names of methods; all by default")
    parser.add_argument("--finished", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="file for the rows")
    asked = parser.parse_args()
    runs = asked.runs or Path("runs") / f"leaderboard-{asked.model}"
    loaded = {column: load(configured(column, "fedavg")) for column in COLUMNS}
    found: dict[str, list[Row]] = {column: [] for column in COLUMNS}
    failed: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for column, data in loaded.items():
        for name in asked.only or methods(asked.model):
            folder = runs / folder_name(f"{name} {column}", 0)
            if asked.finished and not (folder / RESULTS).exists():
                continue
            try:
                done = finished(configured(column, name, asked.model), folder, data)
            except RunError as error:  # a method that diverges is a result
                failed[column].append(algorithms.find(name).title)
                print(f"{column}: {name}: {error}", file=sys.stderr, flush=True)
                continue
            found[column].append(row(algorithms.find(name).title, done, data.test.sizes.tolist()))
            print(f"{column}: {found[column][-1]}", file=sys.stderr, flush=True)
    if asked.json:
        made = {column: [asdict(one) for one in rows] for column, rows in found.items()}
        asked.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    for column, rows in found.items():
        ended = [f"- Diverged and did not finish: {', '.join(failed[column])}."] * bool(failed[column])
        lines = [*table(rows), "", *summary(rows, int(loaded[column].test.sizes.sum())), *ended]
        print("\n".join([f"### {column}", "", *lines, ""]))


if __name__ == "__main__":
    main()
