"""Does `--algorithm auto` serve every site? Against each single algorithm, and against training alone, on test data.

FEDTAILOR_DATA=... python benchmarks/auto.py [TASK ...] [--seeds 0,1,2] [--out runs/auto]

Three tasks: four hospitals, 30 writers of QMNIST, and a folder of 12 CSV files of which one is an outlier. Every
algorithm that auto compares is also run to its end with the same settings. Resumable: finished runs are kept.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from fedtailor.experiments import runner
from fedtailor.experiments.store import RunFolder
from fedtailor.metrics.summary import share_hurt
from fedtailor.tables import fit, halving

SITES, OUTLIER = 12, 11
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # data, and settings that differ from those of fit
    "heart disease": ({"source": "heart-disease"}, {}),
    "30 QMNIST writers": ({"source": "qmnist", "clients": 30}, {"model.name": "mlp", "model.hidden": [64]}),
    "12 files, one outlier": ({"source": "folder", "target": "outcome"}, {}),
}


def make_sites(folder: Path, seed: int) -> None:
    """12 sites that differ a little in what makes people ill; at the last one everything works the other way round."""
    draw = np.random.default_rng([seed, 12])
    folder.mkdir(parents=True, exist_ok=True)
    common = np.array([1.5, -1.0, 0.8, 0.0])
    for site in range(SITES):
        rows = int(draw.integers(40, 160))
        x, arm = draw.normal(size=(rows, 4)), draw.choice(["a", "b", "c"], rows)
        effect = (common + 0.15 * draw.normal(size=4)) * (-1 if site == OUTLIER else 1)
        risk = x @ effect + (arm == "a") * x[:, 2] + 0.5 * draw.normal() + 0.7 * draw.normal(size=rows)
        with (folder / f"site-{site:02d}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["age", "dose", "pressure", "weight", "arm", "outcome"])
            for values, where, r in zip(x, arm, risk, strict=True):
                lines.writerow([*(f"{v:.4f}" for v in values), where, "ill" if r > 0 else "well"])


def run(task: str, seed: int, out: Path) -> dict[str, list[float]]:
    """Test figure of every site by algorithm, and by auto."""
    source, values = TASKS[task]
    folder = out / f"{task.replace(' ', '-').replace(',', '')}-seed{seed}"
    if source["source"] == "folder":
        path = out / f"sites-{seed}"
        if not path.exists():
            make_sites(path, seed)
        source = source | {"path": str(path)}
    made = halving.plan(source, folder, seed=seed, values=values)
    record = fit.fit(source, folder, seed=seed, values=values, loaded=made.data)
    figures = {"auto": [row["personal"] for row in record["sites"].values()]}
    for cell in made.cells:
        runner.resume(cell.folder, loaded=made.data)  # those that auto dropped go on from where they were
        figures[cell.label] = tested(cell.folder, record["metric"])
    return figures


def tested(folder: Path, metric: str) -> list[float]:
    """Of every site, in the round selected on validation data."""
    results = RunFolder(folder).results
    assert results is not None
    return list(results[halving.KIND]["clients"][metric])


def table(task: str, found: Mapping[int, Mapping[str, list[float]]]) -> list[str]:
    """The figures of a task as Markdown; all tasks here are measured by accuracy."""
    labels = list(next(iter(found.values())))
    means = {label: [mean(by[label]) for by in found.values()] for label in labels}
    spread = {label: stdev(values) if len(values) > 1 else 0.0 for label, values in means.items()}
    hurt = {
        label: mean(share_hurt(by[label], by["Local"], higher_is_better=True) for by in found.values())
        for label in labels
    }
    best = max((label for label in labels if label != "auto"), key=lambda label: mean(means[label]))
    line = mean(means[best]) - spread[best]
    holds = {"mean": mean(means["auto"]) >= line, "hurt": hurt["auto"] < 0.1}
    out = [f"\n### {task}\n", "| algorithm | test accuracy % | sites worse off than alone |", "|---|---:|---:|"]
    out += [
        f"| {label} | {100 * mean(means[label]):.2f} ± {100 * spread[label]:.2f} | {100 * hurt[label]:.1f} % |"
        for label in labels
    ]
    sites = sum(len(by["auto"]) for by in found.values())
    return [
        *out,
        f"\nBest single: {best}; its mean minus its spread is {100 * line:.2f}: "
        f"{'held' if holds['mean'] else 'missed'}. "
        f"Worse off than alone: {100 * hurt['auto']:.1f} % of {sites} sites over seeds, below 10 %: "
        f"{'held' if holds['hurt'] else 'missed'}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/auto"))
    given = parser.parse_args()
    for task in given.tasks or TASKS:
        found = {int(seed): run(task, int(seed), given.out) for seed in given.seeds.split(",")}
        print("\n".join(table(task, found)), flush=True)


if __name__ == "__main__":
    main()
