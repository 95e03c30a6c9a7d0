"""Do the intervals of `fit` cover what they promise, and are its probabilities calibrated? For benchmarks/fit.py.

For numbers: the share of test rows inside the 90 % intervals, over all sites. For two classes: the expected calibration
error (10 bins of equally many test rows of all sites) before and after calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL, BINS = 0.9, 10


def coverage(y: Floats, low: Floats, high: Floats) -> dict[str, float]:
    return {"coverage": float(((low <= y) & (y <= high)).mean()), "width": float((high - low).mean())}


def calibration_error(p: Floats, y: NDArray[np.int64]) -> float:
    """Mean distance of probability and frequency in bins of equally many rows."""
    parts = np.array_split(np.argsort(p, kind="stable"), BINS)
    return float(sum(len(at) * abs(p[at].mean() - y[at].mean()) for at in parts if len(at)) / len(p))


def uncalibrated(p: Floats, slope: Floats, offset: Floats) -> Floats:
    """The probability of the second class as it was before its logit was multiplied and shifted."""
    logit = np.log(np.clip(p, 1e-15, 1)) - np.log(np.clip(1 - p, 1e-15, 1))
    return 1 / (1 + np.exp(-(logit - offset) / slope))


def calibrated(p: Floats, y: NDArray[np.int64], slope: Floats, offset: Floats) -> dict[str, Any]:
    """Calibration error and log loss without and with what was settled out of fold."""
    out: dict[str, Any] = {"changed": bool(((slope != 1) | (offset != 0)).any())}
    for key, said in (("before", uncalibrated(p, slope, offset)), ("after", p)):
        loss = -np.log(np.clip(np.where(y == 1, said, 1 - said), 1e-12, 1)).mean()
        out |= {f"error {key}": calibration_error(said, y), f"log loss {key}": float(loss)}
    return out


def page(by_table: Mapping[str, list[dict[str, Any]]]) -> str:
    """Means over seeds as Markdown."""

    def cell(name: str, key: str, scale: float = 1.0, digits: str = ".4f") -> str:
        values = scale * np.array([each[key] for each in by_table[name]])
        return format(values.mean(), digits) + (f" ± {format(values.std(), digits)}" if len(values) > 1 else "")

    numbers = [name for name, each in by_table.items() if each and "coverage" in each[0]]
    classes = [name for name, each in by_table.items() if each and "error before" in each[0]]
    lines = []
    if numbers:
        lines += ["| table | 90 % intervals cover, % | mean width |", "|---|---:|---:|"]
        lines += [f"| {n} | {cell(n, 'coverage', 100, '.1f')} | {cell(n, 'width', 1, '.4g')} |" for n in numbers]
        lines += [f"| mean | {np.mean([100 * e['coverage'] for n in numbers for e in by_table[n]]):.1f} | |", ""]
    if classes:
        lines += ["| table | fits changed | calibration error before | after | log loss before | after |"]
        lines += ["|---|---:|---:|---:|---:|---:|"]
    for n in classes:
        keys = ("error before", "error after", "log loss before", "log loss after")
        changed = sum(each["changed"] for each in by_table[n])
        lines.append(f"| {n} | {changed} of {len(by_table[n])} | " + " | ".join(cell(n, key) for key in keys) + " |")
    return "\n".join(lines)
