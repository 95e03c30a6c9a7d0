"""Categories of a column that has very many, each by what the target is like in its training rows.

Per category only its number of rows and the sum of their targets over all sites are used. What is said of a category is
drawn towards what is said of all rows, the more so the fewer rows it has; a category of very few rows says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from fedtailor.core.random import stream
from fedtailor.data.preparation import MISSING, CategoryColumn, Floats, TargetColumn

PULL = 10.0  # rows that all categories together are worth for one
FEWEST = 3  # rows of a category in all sites
FOLDS = 5


def with_statistics(
    column: CategoryColumn,
    labels: Sequence[Any],
    targets: Sequence[NDArray[Any]],
    train: Sequence[NDArray[np.int64]],
    target: TargetColumn,
    seed: int,
) -> tuple[CategoryColumn, list[Floats]]:
    """The column with what each category says, and for every site what it says of training rows without their fold."""
    texts = [
        pl.Series(each, dtype=pl.String).fill_null(MISSING).gather(at) for each, at in zip(labels, train, strict=True)
    ]
    counts = pl.concat(texts).value_counts().filter(pl.col("count") >= FEWEST)
    known = counts.sort(["count", counts.columns[0]], descending=[True, False])[counts.columns[0]].to_list()
    codes = [
        each.replace_strict(known, list(range(len(known))), default=len(known), return_dtype=pl.Int64).to_numpy()
        for each in texts
    ]
    parts = [_sums(y[at], target) for y, at in zip(targets, train, strict=True)]
    folds = [stream(seed, i, column.name, "statistics").integers(FOLDS, size=len(at)) for i, at in enumerate(train)]
    by_fold = np.zeros((FOLDS, len(known) + 1, parts[0].shape[1]))
    for code, part, fold in zip(codes, parts, folds, strict=True):
        np.add.at(by_fold, (fold, code), part)
    total = by_fold.sum(0)
    everywhere = _statistics(total, total.sum(0), target)
    elsewhere = np.stack([_statistics(total - own, (total - own).sum(0), target) for own in by_fold])
    everywhere[-1], elsewhere[:, -1] = 0.0, 0.0  # categories of very few rows
    encoded = column.model_copy(
        update={
            "categories": tuple(known),
            "statistics": tuple(tuple(row) for row in everywhere[:-1].tolist()),
            "statistic_names": _names(column.name, target),
        }
    )
    return encoded, [elsewhere[fold, code] for fold, code in zip(folds, codes, strict=True)]


def _sums(y: NDArray[Any], target: TargetColumn) -> Floats:
    """What is summed of each row: its class, or 1 and its number."""
    if target.task == "classification":
        return np.eye(len(target.classes))[y]
    return np.column_stack([np.ones(len(y)), y[:, 0]])


def _statistics(sums: Floats, total: Floats, target: TargetColumn) -> Floats:
    """Of each category [categories, statistics], from its sums; 0 is what all rows say."""
    if target.task == "classification":
        shares = (total + 1) / (total + 1).sum()
        logs = np.log((sums + PULL * shares) / shares)
        return logs[:, 1:] - logs[:, :1]
    if target.task == "count":
        rate = (total[1:] + 0.5) / max(total[0], 1.0)
        return np.log((sums[:, 1:] + PULL * rate) / (sums[:, :1] + PULL)) - np.log(rate)
    mean = total[1:] / max(total[0], 1.0)
    return (sums[:, 1:] + PULL * mean) / (sums[:, :1] + PULL) - mean


def _names(column: str, target: TargetColumn) -> tuple[str, ...]:
    if target.task == "classification":
        return tuple(f"{column} (log-odds of {name})" for name in target.classes[1:])
    return (f"{column} (mean {target.name})",)
