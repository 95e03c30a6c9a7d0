"""From raw columns of several sites to equal feature matrices: impute, standardise and one-hot encode.

Everything learnt from data (medians, means, spreads) is learnt from training rows only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.data.configs import SplitConfig
from fedtailor.data.splits import Split, split, split_note, starts
from fedtailor.data.tabular.preparation import (
    MISSING,
    CategoryColumn,
    Floats,
    NumberColumn,
    Preparation,
    Scale,
    TargetColumn,
)
from fedtailor.errors import DataError

if TYPE_CHECKING:
    from fedtailor.data.tabular.earlier_rows import EarlierRows

PULL = 10.0  # shrinkage: the rows that the overall statistic counts for in each category
FEWEST = 3  # rows of a category over all sites, below which its statistic is 0
FOLDS = 5


@dataclass(frozen=True)
class SiteColumns:
    """One client's rows: numbers with NaN where missing, categories with None where missing."""

    name: str
    file: str  # for error messages
    numeric: dict[str, Floats]
    categorical: dict[str, pl.Series | list[str | None]]
    y: NDArray[Any]  # int64 classes or float64 numbers


def encode_sites(
    name: str,
    sites: Sequence[SiteColumns],
    columns: Sequence[str],
    target: TargetColumn,
    config: SplitConfig,
    standardise: Literal["client", "pooled", "none"],
    *,
    seed: int,
    standardise_target: bool = False,
    notes: tuple[str, ...] = (),
    newcomers: int = 0,
    dates: Collection[str] = (),
    zero_is_missing: Collection[str] = (),
    categories: Mapping[str, Sequence[str]] | None = None,
    absent: Mapping[str, tuple[str, ...]] | None = None,
    earlier: EarlierRows | None = None,
    many: Collection[str] = (),
) -> FederatedData:
    """Split every site, then build the same feature columns for all, in the order of `columns`.

    The last `newcomers` of the sites are encoded as the others are: scales and categories do not depend on them.
    `categories` are agreed on by column; without them those of the sites are used. `absent` has by column the sites
    without it. With `earlier`, known rows stay on their side of the split.
    `many` are columns of very many categories, which are encoded by statistics of the target.
    """
    is_class = target.task == "classification"
    if earlier is not None:
        earlier.check(sites, columns, target.task)
        cuts = [earlier.cut(site, target.classes, config, seed) for site in sites]
    else:
        cuts = [split(len(site.y), site.y if is_class else None, config, seed=seed, client=site.name) for site in sites]
    founders = sites[: len(sites) - newcomers]
    training_rows = [cut.train for cut in cuts[: len(founders)]]
    is_scaled = standardise_target and target.task == "regression"
    if is_scaled:
        raw = [target.standardise(site.y[rows])[:, 0] for site, rows in zip(founders, training_rows, strict=True)]
        mean, sd = pooled_moments(raw)
        target = target.model_copy(update={"mean": mean, "sd": sd})
    y = [site.y if is_class else target.standardise(site.y) for site in sites]
    new_notes: list[str] = []
    learnt: list[NumberColumn | CategoryColumn] = []
    out_of_fold: dict[str, list[Floats]] = {}  # statistics of training rows, without their own targets
    for column in columns:
        absent_at = (absent or {}).get(column, ())
        if column in sites[0].numeric:
            scales, filled, outliers = _scales(column, sites, cuts, standardise, len(founders))
            new_notes.extend(outliers)
            if filled:
                new_notes.append(f'column "{column}": {filled} missing values filled with training medians')
            learnt.append(
                NumberColumn(
                    name=column,
                    is_date=column in dates,
                    date_order=dates[column] if isinstance(dates, Mapping) and column in dates else "",
                    zero_is_missing=column in zero_is_missing,
                    sites=scales,
                    absent=absent_at,
                )
            )
        elif column in many:
            labels = [site.categorical[column] for site in founders]
            encoded, out_of_fold[column] = encode_by_target(
                column, absent_at, labels, y[: len(founders)], training_rows, target, seed
            )
            learnt.append(encoded)
            new_notes.append(f'column "{column}" has very many texts: encoded as {", ".join(encoded.features)}')
        else:
            known = _categories(column, founders) if categories is None else categories[column]
            learnt.append(CategoryColumn(name=column, categories=tuple(known), absent=absent_at))
    new_notes.append(f"numeric columns standardised: {standardise}; categories are 0/1 columns")
    if dates:
        new_notes.append(f"dates are days since 1970-01-01: {', '.join(dates)}")
    preparation = Preparation(columns=tuple(learnt), target=target)
    if earlier is not None:
        preparation = earlier.revise(preparation)
        new_notes.extend(earlier.notes)
        target = preparation.target
        y = [site.y if is_class else target.standardise(site.y) for site in sites]
    if is_scaled:
        new_notes.append(
            f"target standardised: ({'log y' if target.is_log else 'y'} - {target.mean:.6g}) / {target.sd:.6g}"
        )
    matrices = [preparation.encode(site.name, site.numeric, site.categorical, site.file) for site in sites]
    at = 0
    for each in preparation.columns:
        for matrix, rows, values in zip(matrices, training_rows, out_of_fold.get(each.name, ()), strict=False):
            matrix[rows, at : at + values.shape[1]] = values
        at += len(each.features)
    return FederatedData(
        name=name,
        task=target.task,
        clients=tuple(site.name for site in sites),
        train=stack_rows(matrices, y, [cut.train for cut in cuts]),
        val=stack_rows(matrices, y, [cut.val for cut in cuts]),
        test=stack_rows(matrices, y, [cut.test for cut in cuts]),
        outputs=len(target.classes) if is_class else 1,
        classes=target.classes,
        features=preparation.features,
        notes=(*notes, split_note(config), *new_notes),
        preparation=preparation,
    )


def _scales(
    column: str,
    sites: Sequence[SiteColumns],
    cuts: Sequence[Split],
    how: Literal["client", "pooled", "none"],
    founders: int,
) -> tuple[dict[str, Scale], int, list[str]]:
    """Each site's scale, learnt from training rows; how many values are missing; a note on outliers.

    A site without any value is filled with the median of all training rows of the first `founders` sites.
    """
    values = [site.numeric[column] for site in sites]
    filled = int(sum(np.isnan(v).sum() for v in values))
    train = [v[cut.train] for v, cut in zip(values, cuts, strict=True)]
    known = [v[~np.isnan(v)] for v in train]
    pooled = np.concatenate(known[:founders])
    if len(pooled) == 0:
        raise DataError(
            f'{sites[0].file}: column "{column}" has no value in the training rows of any client; '
            f"leave it out with data.ignore = ['{column}']"
        )
    common = float(np.median(pooled))
    medians = [float(np.median(k)) if len(k) else common for k in known]
    names = [site.name for site in sites]
    gaps = [round(1 - len(k) / max(len(v), 1), 6) for k, v in zip(known, train, strict=True)]
    if how == "none":
        plain = zip(names, medians, gaps, strict=True)
        return {name: Scale(median=median, missing=gap) for name, median, gap in plain}, filled, []
    of_all = _widen(pooled, 0.05, 2.0)
    limits = [_limits(of_all, own) for own in known]
    outliers = _note_outliers(column, sites, values, limits)
    train = [
        np.where(np.isnan(v), median, v if limit is None else np.clip(v, *limit))
        for v, median, limit in zip(train, medians, limits, strict=True)
    ]
    moments = (
        [pooled_moments([own]) for own in train] if how == "client" else [pooled_moments(train[:founders])] * len(train)
    )
    scales = {
        name: Scale(median=median, mean=mean, sd=sd, low=limit and limit[0], high=limit and limit[1], missing=gap)
        for name, median, (mean, sd), limit, gap in zip(names, medians, moments, limits, gaps, strict=True)
    }
    return scales, filled, outliers


def _widen(values: Floats, tail: float, times: float) -> tuple[float, float]:
    low, high = (float(q) for q in np.quantile(values, [tail, 1 - tail]))
    return low - times * (high - low), high + times * (high - low)


def _limits(of_all: tuple[float, float], own: Floats) -> tuple[float, float] | None:
    """Bounds beyond which a value is an outlier, by all sites and by the site itself, whose units may differ."""
    low, high = of_all
    if low == high:  # mostly one value, such as 0: anything else may be meant
        return None
    if len(own) >= 10:
        own_low, own_high = _widen(own, 0.1, 3.0)
        low, high = min(low, own_low), max(high, own_high)
    return low, high


def _note_outliers(
    column: str, sites: Sequence[SiteColumns], values: Sequence[Floats], limits: Sequence[tuple[float, float] | None]
) -> list[str]:
    places, count = [], 0
    for site, v, limit in zip(sites, values, limits, strict=True):
        at = [] if limit is None else np.flatnonzero((v < limit[0]) | (v > limit[1])).tolist()
        places += [f"{site.name} row {row + 1} ({v[row]:g})" for row in at[:3]]
        count += len(at)
    if not count:
        return []
    more = "" if count <= len(places[:5]) else ", ..."
    return [
        f'column "{column}": {count} values are far from all others and are clipped to the limit: '
        f"{', '.join(places[:5])}{more}; correct them, or leave them empty if they stand for missing values"
    ]


def pooled_moments(parts: Sequence[Floats]) -> tuple[float, float]:
    """Mean and standard deviation from sums over clients; the standard deviation of a constant column is 1."""
    count = sum(len(part) for part in parts)
    mean = sum(float(part.sum()) for part in parts) / count
    sd = float(np.sqrt(sum(float(((part - mean) ** 2).sum()) for part in parts) / count))
    largest = max(float(np.abs(part).max(initial=0.0)) for part in parts)
    # rounding alone gives a constant column a standard deviation of about 1e-16 of its value
    return mean, sd if sd > 1e-12 * largest else 1.0


def _categories(column: str, sites: Sequence[SiteColumns]) -> list[str]:
    values = {value for site in sites for value in site.categorical[column]}
    return sort_values(value for value in values if value is not None and value != MISSING) + (
        [MISSING] if values & {None, MISSING} else []
    )


def sort_values(values: Iterable[str]) -> list[str]:
    """Distinct values in order: as numbers if all are numbers, else as text."""
    distinct = sorted(set(values))
    try:
        return sorted(distinct, key=float)
    except ValueError:
        return distinct


def stack_rows(
    matrices: Sequence[Floats], targets: Sequence[NDArray[Any]], positions: Sequence[NDArray[np.int64]]
) -> Rows:
    x = np.concatenate([matrix[at] for matrix, at in zip(matrices, positions, strict=True)])
    y = np.concatenate([target[at] for target, at in zip(targets, positions, strict=True)])
    return Rows(torch.from_numpy(x), torch.from_numpy(y), starts([len(at) for at in positions]))


def encode_by_target(
    column: str,
    absent: tuple[str, ...],
    labels: Sequence[Any],
    targets: Sequence[NDArray[Any]],
    train: Sequence[NDArray[np.int64]],
    target: TargetColumn,
    seed: int,
) -> tuple[CategoryColumn, list[Floats]]:
    """A column of very many categories, each encoded by what the target is like in its training rows.

    Only each category's number of rows and the sum of their targets over all sites are used. Statistics are shrunk
    towards those of all rows, the more so the fewer rows a category has; a category of very few rows gets 0.
    The second result is for each site the statistics of its training rows, computed without the row's fold.
    """
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
    folds = [stream(seed, i, column, "statistics").integers(FOLDS, size=len(at)) for i, at in enumerate(train)]
    by_fold = np.zeros((FOLDS, len(known) + 1, parts[0].shape[1]))
    for code, part, fold in zip(codes, parts, folds, strict=True):
        np.add.at(by_fold, (fold, code), part)
    total = by_fold.sum(0)
    everywhere = _statistics(total, total.sum(0), target)
    elsewhere = np.stack([_statistics(total - own, (total - own).sum(0), target) for own in by_fold])
    everywhere[-1], elsewhere[:, -1] = 0.0, 0.0  # categories of very few rows
    encoded = CategoryColumn(
        name=column,
        categories=tuple(known),
        absent=absent,
        statistics=tuple(tuple(row) for row in everywhere[:-1].tolist()),
        statistic_names=_statistic_names(column, target),
    )
    return encoded, [elsewhere[fold, code] for fold, code in zip(folds, codes, strict=True)]


def _sums(y: NDArray[Any], target: TargetColumn) -> Floats:
    """What is summed over rows [rows, sums]: one-hot classes, or 1 and the target."""
    if target.task == "classification":
        return np.eye(len(target.classes))[y]
    return np.column_stack([np.ones(len(y)), y[:, 0]])


def _statistics(sums: Floats, total: Floats, target: TargetColumn) -> Floats:
    """Statistics [categories, statistics] from sums; 0 is the value of all rows together."""
    if target.task == "classification":
        shares = (total + 1) / (total + 1).sum()
        logs = np.log((sums + PULL * shares) / shares)
        return logs[:, 1:] - logs[:, :1]
    if target.task == "count":
        rate = (total[1:] + 0.5) / max(total[0], 1.0)
        return np.log((sums[:, 1:] + PULL * rate) / (sums[:, :1] + PULL)) - np.log(rate)
    mean = total[1:] / max(total[0], 1.0)
    return (sums[:, 1:] + PULL * mean) / (sums[:, :1] + PULL) - mean


def _statistic_names(column: str, target: TargetColumn) -> tuple[str, ...]:
    if target.task == "classification":
        return tuple(f"{column} (log-odds of {name})" for name in target.classes[1:])
    return (f"{column} (mean {target.name})",)
