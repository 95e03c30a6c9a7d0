"""Do the intervals of `fit` cover what they promise, and are its probabilities calibrated?

    python -m benchmarks.fit_intervals --seeds 5 --out build/fit_intervals.json

The tables and cuts are those of benchmarks/fit.py: a quarter of each site's rows is for testing. For numbers: the share
of test rows inside the 90 % intervals, over all sites. For two classes: the expected calibration error (10 bins of
equal size over the test rows of all sites) before and after calibration.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

import fedtailor as ft
from benchmarks.fit import cut
from benchmarks.fit_tables import TABLES, Table
from fedtailor.experiments.store import FIT, read_json, write_json

Floats = NDArray[np.float64]
LEVEL, BINS = 0.9, 10
CLASSES = ("contraception", "headache", "heart", "tiny")


def fitted(table: Table, train: pl.DataFrame, seed: int, folder: Path, is_class: bool) -> ft.Fit:
    _, site, target = table
    task = "classification" if is_class else "regression"
    settings = {"data.test": 0.0, "data.task": task}
    return ft.fit(train, target, client_column=site, seed=seed, settings=settings, out=folder, progress=False)


def coverage(run: ft.Fit, test: pl.DataFrame, site: str, target: str) -> dict[str, Any]:
    """Inside or not, of every test row."""
    inside, widths = [], []
    for name in test[site].unique().to_list():
        part = test.filter(pl.col(site) == name)
        low, high = run.personal(str(name)).predict_interval(part.drop(target), LEVEL)
        y = part[target].to_numpy()
        each = (low <= y) & (y <= high)
        inside.append(each)
        widths.append(high - low)
    return {"coverage": float(np.concatenate(inside).mean()), "width": float(np.concatenate(widths).mean())}


def calibration_error(p: Floats, y: NDArray[np.int64]) -> float:
    """Mean distance of probability and frequency in bins of equally many rows."""
    parts = np.array_split(np.argsort(p, kind="stable"), BINS)
    return float(sum(len(at) * abs(p[at].mean() - y[at].mean()) for at in parts if len(at)) / len(p))


def calibrated(run: ft.Fit, test: pl.DataFrame, site: str, target: str) -> dict[str, Any]:
    """Calibration error and log loss with and without what was settled out of fold."""
    out: dict[str, Any] = {}
    record = read_json(run.path / FIT)
    plain = record | {
        "sites": {n: {k: v for k, v in r.items() if k != "calibration"} for n, r in record["sites"].items()}
    }
    for key, held in (("before", plain), ("after", record)):
        write_json(run.path / FIT, held)
        p, y = [], []
        for name in test[site].unique().to_list():
            part, model = test.filter(pl.col(site) == name), run.personal(str(name))
            p.append(model.predict_proba(part.drop(target))[:, 1])
            y.append((part[target].cast(pl.String) == str(model.labels[1])).to_numpy().astype(np.int64))
        said, is_second = np.concatenate(p), np.concatenate(y)
        losses = -np.log(np.clip(np.where(is_second == 1, said, 1 - said), 1e-12, 1))
        out |= {f"error {key}": calibration_error(said, is_second), f"log loss {key}": float(losses.mean())}
    return out | {"changed": "calibration" in next(iter(record["sites"].values()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--out", type=Path, default=Path("build/fit_intervals.json"))
    options = parser.parse_args()
    done: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.tables.split(","):
        table = TABLES[name]()
        _, site, target = table
        for seed in range(options.seeds):
            if f"{name} {seed}" in done:
                continue
            train, test, _ = cut(table, seed)
            is_class = name in CLASSES
            with tempfile.TemporaryDirectory() as folder:
                run = fitted(table, train, seed, Path(folder) / "fit", is_class)
                found = (calibrated if is_class else coverage)(run, test, site, target)
            done[f"{name} {seed}"] = found
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(done, indent=1))
            print(name, seed, found, flush=True)
    print(page(done))


def page(done: dict[str, Any]) -> str:
    """Means over seeds as Markdown."""
    lines = ["| table | seeds | 90 % intervals cover | mean width |", "|---|---:|---:|---:|"]
    numbers: dict[str, list[dict[str, Any]]] = {}
    for key, found in done.items():
        numbers.setdefault(key.rpartition(" ")[0], []).append(found)

    def mean(name: str, key: str) -> float:
        return float(np.mean([found[key] for found in numbers[name]]))

    lines += [
        f"| {name} | {len(found)} | {100 * mean(name, 'coverage'):.1f} % | {mean(name, 'width'):.4g} |"
        for name, found in numbers.items()
        if name not in CLASSES
    ]
    lines += ["", "| table | seeds | changed | calibration error before | after | log loss before | after |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    for name in (n for n in numbers if n in CLASSES):
        keys = ("error before", "error after", "log loss before", "log loss after")
        cells = " | ".join(f"{mean(name, key):.4f}" for key in keys)
        changed = sum(found["changed"] for found in numbers[name])
        lines.append(f"| {name} | {len(numbers[name])} | {changed} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
