"""From raw columns of several sites to equal feature matrices: impute, standardise and one-hot encode.

Everything learnt from data (medians, means, spreads) is learnt from training rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data.configs import SplitConfig
from fedtailor.data.federated import FederatedData, Rows, TaskKind
from fedtailor.data.splits import Split, split, split_note, starts
from fedtailor.errors import DataError

MISSING = "missing"  # the category of values that are not there
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Site:
    """One client's rows: numbers with NaN where missing, categories with None where missing."""

    name: str
    file: str  # for error messages
    numeric: dict[str, Floats]
    categorical: dict[str, list[str | None]]
    y: NDArray[Any]  # int64 classes or float64 numbers


@dataclass(frozen=True)
class Target:
    """What is predicted; `classes` is empty for regression."""

    task: TaskKind
    classes: tuple[str, ...] = ()
    standardise: bool = False


def assemble(
    name: str,
    sites: Sequence[Site],
    columns: Sequence[str],
    target: Target,
    config: SplitConfig,
    standardise: Literal["client", "pooled", "none"],
    *,
    seed: int,
    notes: tuple[str, ...] = (),
    newcomers: int = 0,
    categories: Mapping[str, Sequence[str]] | None = None,
) -> FederatedData:
    """Split every site, then build the same feature columns for all, in the order of `columns`.

    The last `newcomers` of the sites are encoded as the others are: scales and categories do not depend on them.
    `categories` are those agreed on, by column; else those that the sites have.
    """
    labelled = target.task == "classification"
    settled = len(sites) - newcomers
    cuts = [split(len(site.y), site.y if labelled else None, config, seed=seed, client=site.name) for site in sites]
    made: list[str] = []
    features: list[str] = []
    blocks: list[list[Floats]] = [[] for _ in sites]
    for column in columns:
        if column in sites[0].numeric:
            values, filled = _impute(column, sites, cuts, settled)
            if filled:
                made.append(f'column "{column}": {filled} missing values filled with training medians')
            encoded = [v[:, None] for v in _standardise(values, cuts, standardise, settled)]
            features.append(column)
        else:
            known = _categories(column, sites[:settled]) if categories is None else categories[column]
            encoded = [_one_hot(column, site, known) for site in sites]
            features += [f"{column}={category}" for category in known]
        for block, matrix in zip(blocks, encoded, strict=True):
            block.append(matrix)
    made.append(f"numeric columns standardised: {standardise}; categories are 0/1 columns")
    matrices = [np.concatenate(block, axis=1) for block in blocks]
    targets = [site.y for site in sites]
    if not labelled:
        if target.standardise:
            mean, sd = _moments([t[cut.train] for t, cut in zip(targets, cuts, strict=True)][:settled])
            targets = [(t - mean) / sd for t in targets]
            made.append(f"target standardised: (y - {mean:.6g}) / {sd:.6g}")
        targets = [t[:, None] for t in targets]
    return FederatedData(
        name=name,
        task=target.task,
        clients=tuple(site.name for site in sites),
        train=_rows(matrices, targets, [cut.train for cut in cuts]),
        val=_rows(matrices, targets, [cut.val for cut in cuts]),
        test=_rows(matrices, targets, [cut.test for cut in cuts]),
        outputs=len(target.classes) if labelled else 1,
        classes=target.classes,
        features=tuple(features),
        notes=(*notes, split_note(config), *made),
    )


def _impute(column: str, sites: Sequence[Site], cuts: Sequence[Split], settled: int) -> tuple[list[Floats], int]:
    """Fill with the site's training median, or the median of all training rows where a site has no value."""
    values = [site.numeric[column] for site in sites]
    gaps = [np.isnan(v) for v in values]
    filled = int(sum(gap.sum() for gap in gaps))
    if filled == 0:
        return values, 0
    known = [v[cut.train][~np.isnan(v[cut.train])] for v, cut in zip(values, cuts, strict=True)]
    pooled = np.concatenate(known[:settled])
    if len(pooled) == 0:
        raise DataError(
            f'{sites[0].file}: column "{column}" has no value in the training rows of any client; '
            f"leave it out with data.ignore = ['{column}']"
        )
    medians = [np.median(k) if len(k) else np.median(pooled) for k in known]
    return [np.where(gap, median, v) for gap, median, v in zip(gaps, medians, values, strict=True)], filled


def _standardise(
    values: list[Floats], cuts: Sequence[Split], how: Literal["client", "pooled", "none"], settled: int
) -> list[Floats]:
    if how == "none":
        return values
    train = [v[cut.train] for v, cut in zip(values, cuts, strict=True)]
    scales = [_moments([t]) for t in train] if how == "client" else [_moments(train[:settled])] * len(train)
    return [(v - mean) / sd for v, (mean, sd) in zip(values, scales, strict=True)]


def _moments(parts: Sequence[Floats]) -> tuple[float, float]:
    """Mean and standard deviation from sums over clients; a constant column has spread 1."""
    count = sum(len(part) for part in parts)
    mean = sum(float(part.sum()) for part in parts) / count
    sd = float(np.sqrt(sum(float(((part - mean) ** 2).sum()) for part in parts) / count))
    # rounding alone gives a constant column a spread of about 1e-16 of its value
    return mean, sd if sd > 1e-12 * max(1.0, abs(mean)) else 1.0


def _categories(column: str, sites: Sequence[Site]) -> list[str]:
    found = {value for site in sites for value in site.categorical[column]}
    return sort_values(value for value in found if value is not None and value != MISSING) + (
        [MISSING] if found & {None, MISSING} else []
    )


def sort_values(values: Iterable[str]) -> list[str]:
    """Distinct values in order: as numbers if all are numbers, else as text."""
    distinct = sorted(set(values))
    try:
        return sorted(distinct, key=float)
    except ValueError:
        return distinct


def _one_hot(column: str, site: Site, categories: Sequence[str]) -> Floats:
    position = {category: i for i, category in enumerate(categories)}
    values = [MISSING if v is None else v for v in site.categorical[column]]
    if unknown := [v for v in values if v not in position]:
        raise DataError(
            f'{site.file}: column "{column}" has the value "{unknown[0]}", which no client of the run has; '
            f"known: {', '.join(categories)}"
        )
    matrix = np.zeros((len(values), len(categories)))
    matrix[np.arange(len(values)), [position[v] for v in values]] = 1.0
    return matrix


def _rows(matrices: Sequence[Floats], targets: Sequence[NDArray[Any]], positions: Sequence[NDArray[np.int64]]) -> Rows:
    x = np.concatenate([matrix[at] for matrix, at in zip(matrices, positions, strict=True)])
    y = np.concatenate([target[at] for target, at in zip(targets, positions, strict=True)])
    labelled = y.dtype == np.int64
    return Rows(
        torch.from_numpy(x).to(torch.float32),
        torch.from_numpy(y) if labelled else torch.from_numpy(y).to(torch.float32),
        starts([len(at) for at in positions]),
    )
