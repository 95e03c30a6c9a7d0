"""Permutation importance: how much worse predictions of a site's held-out rows get when a column is shuffled there.

Breiman, Mach. Learn. 45, 2001. Rows are shuffled within their site and never leave it; over sites only sums are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import Rows
from fedtailor.core.random import stream
from fedtailor.core.task import Metric
from fedtailor.studies.site_metrics import FEWEST_ROWS, OF_UNITS, at_site

Floats = NDArray[np.float64]
Predict = Callable[[Rows], Tensor]  # what serves the sites says of their rows
REPEATS = 5
MOST_ROWS = 500  # of a site
MOST_NUMBERS = 6_000_000  # in all shuffled rows together
MOST_COLUMNS = 30


def sampled(rows: Rows, copies: int, seed: int) -> Rows:
    """Some rows of every site, so few that `copies` of them are predicted in seconds."""
    sizes, width = rows.sizes.numpy(), max(int(rows.x.shape[1]), 1)
    most = MOST_ROWS
    while most > FEWEST_ROWS and int(np.minimum(sizes, most).sum()) * copies * width > MOST_NUMBERS:
        most = most * 4 // 5
    picked, starts = [], [0]
    for i, size in enumerate(sizes.tolist()):
        first = int(rows.starts[i])
        order = np.arange(size) if size <= most else np.sort(stream(seed, i, "rows").permutation(size)[:most])
        picked.append(first + order)
        starts.append(starts[-1] + len(order))
    at = torch.from_numpy(np.concatenate(picked).astype(np.int64))
    return Rows(rows.x[at], rows.y[at], torch.tensor(starts, dtype=torch.int64, device="cpu"))


def stacked(rows: Rows, changed: Callable[[int, Tensor], list[Tensor]]) -> Rows:
    """Of every site several versions of its rows, one after another, as rows of the same sites."""
    xs, ys, sizes = [], [], [0]
    for i in range(len(rows.sizes)):
        x, y = rows.of(i)
        versions = changed(i, x)
        xs += versions
        ys += [y] * len(versions)
        sizes.append(sizes[-1] + sum(map(len, versions)))
    return Rows(torch.cat(xs), torch.cat(ys), torch.tensor(sizes, dtype=torch.int64, device="cpu"))


def unstacked(values: Any, every: Rows, sizes: Sequence[int], versions: int) -> list[list[Any]]:
    """What was said of `stacked` rows: by version, and in it by site."""
    return [
        [values[int(every.starts[i]) + k * n : int(every.starts[i]) + (k + 1) * n] for i, n in enumerate(sizes)]
        for k in range(versions)
    ]


def shuffled(x: Tensor, at: Sequence[int], rng: np.random.Generator) -> Tensor:
    """Rows with the features of one column taken from other rows."""
    out = x.clone()
    order = torch.from_numpy(rng.permutation(len(x)))
    columns = torch.tensor(list(at), dtype=torch.int64, device="cpu")
    out[:, columns] = x[order][:, columns]
    return out


def importance(
    predict: Predict,
    held: Rows,
    sites: Sequence[str],
    columns: Mapping[str, Sequence[int]],
    metric: Metric,
    unit: float,
    seed: int,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """By column, largest first: by how much the metric gets worse, its spread over shuffles, and the same by site."""
    columns = dict(list(columns.items())[:MOST_COLUMNS])
    if not columns:
        return {"metric": metric.name, "rows": 0, "repeats": repeats, "columns": []}
    rows = sampled(held, 1 + repeats * len(columns), seed)

    def versions(site: int, x: Tensor) -> list[Tensor]:
        rng = stream(seed, sites[site], "importance")
        return [x, *(shuffled(x, at, rng) for at in columns.values() for _ in range(repeats))]

    every = stacked(rows, versions)
    outputs = predict(every)
    many, sizes = 1 + repeats * len(columns), rows.sizes.tolist()
    sign = -1.0 if metric.higher_is_better else 1.0
    large = [i for i, size in enumerate(sizes) if size >= FEWEST_ROWS]
    overall, at_sites = measured(metric, outputs, rows, every, many, unit)
    at_sites = at_sites[:, large]
    lost = sign * (overall[1:] - overall[0]).reshape(len(columns), repeats)
    lost_at = sign * (at_sites[1:] - at_sites[0]).reshape(len(columns), repeats, len(large))
    order = sorted(range(len(columns)), key=lambda j: -float(np.nan_to_num(lost[j].mean())))
    names = list(columns)
    return {
        "metric": metric.name,
        "rows": len(rows.x),
        "repeats": repeats,
        "columns": [
            {
                "column": names[j],
                "mean": float(lost[j].mean()),
                "sd": float(lost[j].std(ddof=1)) if repeats > 1 else 0.0,
                "sites": {sites[i]: float(lost_at[j, :, k].mean()) for k, i in enumerate(large)},
            }
            for j in order
        ],
    }


def measured(
    metric: Metric, outputs: Tensor, rows: Rows, every: Rows, versions: int, unit: float
) -> tuple[Floats, Floats]:
    """The metric of each version over all sites, and at each site [versions, sites].

    Over all sites it is that of all rows where it is a mean over rows, else the mean over sites, by rows.
    """
    sizes = rows.sizes.numpy()
    if metric.per_sample is None:
        parts = [torch.cat(each) for each in unstacked(outputs, every, sizes.tolist(), versions)]
        at_sites = np.array([[at_site(metric, part, rows, i, unit) for i in range(len(sizes))] for part in parts])
        weights = sizes * np.isfinite(at_sites)
        return np.nansum(at_sites * weights, axis=1) / np.maximum(weights.sum(1), 1), at_sites
    losses = metric.per_sample(outputs, every.y).double().numpy()
    by_site = unstacked(losses, every, sizes.tolist(), versions)
    sums = np.array([[each.sum() for each in version] for version in by_site])

    def finished(means: Floats) -> Floats:
        values = torch.from_numpy(means) if metric.finish is None else metric.finish(torch.from_numpy(means))
        figures: Floats = values.numpy() * unit ** OF_UNITS.get(metric.name, 0)
        return figures

    return finished(sums.sum(1) / max(int(sizes.sum()), 1)), finished(sums / np.maximum(sizes, 1))
