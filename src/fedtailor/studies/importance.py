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

from fedtailor.core.metric import Metric
from fedtailor.core.random import stream
from fedtailor.core.samples import Rows
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


def unstacked(said: Any, every: Rows, sizes: Sequence[int], versions: int) -> list[list[Any]]:
    """What was said of `stacked` rows: by version, and in it by site."""
    return [
        [said[int(every.starts[i]) + k * n : int(every.starts[i]) + (k + 1) * n] for i, n in enumerate(sizes)]
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
    many = 1 + repeats * len(columns)
    sizes = rows.sizes.tolist()
    by_version = [torch.cat(each) for each in unstacked(outputs, every, sizes, many)]
    sign = -1.0 if metric.higher_is_better else 1.0
    large = [i for i, size in enumerate(sizes) if size >= FEWEST_ROWS]
    at_sites = np.array([[at_site(metric, said, rows, i, unit) for i in large] for said in by_version])
    overall = np.array([overall_value(metric, said, rows, unit) for said in by_version])
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


def overall_value(metric: Metric, outputs: Tensor, rows: Rows, unit: float) -> float:
    """Of all rows together where the metric is a mean over rows, else the mean over sites, by rows."""
    if not len(rows.x):
        return float("nan")
    if metric.per_sample is not None:
        mean = metric.per_sample(outputs, rows.y).double().mean()
        value = float(mean if metric.finish is None else metric.finish(mean))
        return value * unit ** OF_UNITS.get(metric.name, 0)
    sizes = rows.sizes.numpy().astype(np.float64)
    values = np.array([at_site(metric, outputs, rows, i, unit) for i in range(len(sizes))])
    known = np.isfinite(values)
    return float(np.average(values[known], weights=sizes[known])) if known.any() else float("nan")
