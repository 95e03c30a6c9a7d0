"""How predictions change with a column, all else as it is: accumulated local effects of numbers, means by category.

Apley, Zhu, J. R. Stat. Soc. B 82, 2020. Of every interval a site adds a sum of differences and a count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.data.tabular.preparation import NumberColumn
from fedtailor.studies.importance import Predict, sampled, stacked, unstacked

Floats = NDArray[np.float64]
ENDS = (0.025, 0.975)
MOST_LEVELS = 12
Places = dict[str, list[int]]  # column -> its features


def places_of(data: FederatedData) -> Places:
    """The features of every column; of data that no table was read for, each is a column."""
    if data.preparation is None:
        return {name: [j] for j, name in enumerate(data.features or map(str, range(data.shape[0])))}
    out: Places = {}
    at = 0
    for column in data.preparation.columns:
        out[column.name] = list(range(at, at + len(column.features)))
        at += len(column.features)
    return out


def grids(data: FederatedData, inner: Sequence[float] = tuple(np.linspace(0.1, 0.9, 9))) -> dict[str, Floats]:
    """Of every column of numbers some quantiles of all training rows, standardised; from histograms that are summed."""
    places, out = places_of(data), {}
    marks = np.linspace(-6.0, 6.0, 481)
    starts = data.train.starts.tolist()
    for column in data.preparation.columns:
        if not isinstance(column, NumberColumn):
            continue
        x = data.train.x[:, places[column.name][0]].numpy().clip(marks[0], marks[-1])
        total = sum(np.histogram(x[a:b], marks)[0] for a, b in pairwise(starts))
        share = np.cumsum(total) / max(int(np.sum(total)), 1)
        quantiles = [float(marks[np.searchsorted(share, q - 1e-12) + 1]) for q in (ENDS[0], *inner, ENDS[1])]
        low = float(marks[np.searchsorted(share, ENDS[0] - 1e-12)])  # the interval's lower mark, to hold its rows
        out[column.name] = np.unique([low, *quantiles[1:]])
    return out


def curves(
    predict: Predict,
    readable: Callable[[Tensor], Floats],
    held: Rows,
    data: FederatedData,
    columns: Sequence[str],
    seed: int,
) -> list[dict[str, Any]]:
    """Of each column its points, and there the prediction [points, outputs] over all sites and at each site."""
    places, edges = places_of(data), grids(data)
    rows = sampled(held, 2 * len(columns) + MOST_LEVELS, seed)
    drawn_columns = [c for c in data.preparation.columns if c.name in columns]
    bins = {name: _intervals(rows, places[name][0], edges[name]) for name in columns if name in edges}

    def versions(site: int, x: Tensor) -> list[Tensor]:
        first, last = int(rows.starts[site]), int(rows.starts[site + 1])
        out = [x]
        for column in drawn_columns:
            at = places[column.name]
            if column.name in bins:
                k = bins[column.name][first:last]
                out += [_with(x, at[:1], torch.from_numpy(edges[column.name][k + side])[:, None]) for side in (0, 1)]
            else:
                levels = torch.from_numpy(column.matrix[:MOST_LEVELS])
                out += [_with(x, at, level.expand(len(x), -1)) for level in levels]
        return out

    every = stacked(rows, versions)
    predictions, sizes = readable(predict(every)), rows.sizes.tolist()
    whose = np.repeat(np.arange(len(sizes)), sizes)
    many = len(every.x) // max(len(rows.x), 1)
    blocks: list[Floats] = [np.concatenate(each) for each in unstacked(predictions, every, sizes, many)]
    base, blocks = blocks[0], blocks[1:]
    drawn = []
    for column in drawn_columns:
        if isinstance(column, NumberColumn):
            low, high, *blocks = blocks
            drawn.append(_accumulated(column, edges[column.name], bins[column.name], high - low, base, whose, data))
        else:
            many = min(len(column.categories), MOST_LEVELS)
            own, blocks = blocks[:many], blocks[many:]
            drawn.append(_by_category(column.name, column.categories[:many], np.stack(own), whose, data))
    return sorted(drawn, key=lambda each: list(columns).index(each["column"]))


def _with(x: Tensor, at: Sequence[int], values: Tensor) -> Tensor:
    out = x.clone()
    out[:, torch.tensor(list(at), dtype=torch.int64, device="cpu")] = values.to(x.dtype)
    return out


def _intervals(rows: Rows, feature: int, edges: Floats) -> NDArray[np.int64]:
    """The interval of every row; what lies outside counts to the outer ones."""
    x = rows.x[:, feature].numpy()
    return np.clip(np.searchsorted(edges, x, side="left") - 1, 0, max(len(edges) - 2, 0)).astype(np.int64)


def _accumulated(
    column: NumberColumn,
    edges: Floats,
    bins: NDArray[np.int64],
    steps: Floats,
    base: Floats,
    whose: NDArray[np.int64],
    data: FederatedData,
) -> dict[str, Any]:
    intervals, sites = max(len(edges) - 1, 1), len(data.clients)
    sums, count = np.zeros((sites, intervals, steps.shape[1])), np.zeros((sites, intervals))
    np.add.at(sums, (whose, bins), steps)
    np.add.at(count, (whose, bins), 1)
    usual = sums.sum(0) / np.maximum(count.sum(0), 1)[:, None]
    scale = next(iter(column.sites.values()))
    is_same = len({(s.mean, s.sd) for name, s in column.sites.items() if name in data.clients}) == 1
    out: dict[str, Any] = {
        "column": column.name,
        "kind": "number",
        "x": (scale.mean + scale.sd * edges if is_same else edges).tolist(),
        "is_standardised": not is_same,
        "is_date": column.is_date,
        "rows": count.sum(0).tolist(),
        "y": _curve(usual, count.sum(0), base.mean(0)).tolist(),
        "sites": {},
    }
    for i, name in enumerate(data.clients):
        if count[i].sum() >= 5:
            own = np.where(count[i][:, None] > 0, sums[i] / np.maximum(count[i], 1)[:, None], usual)
            out["sites"][name] = _curve(own, count[i], base[whose == i].mean(0)).tolist()
    return out


def _curve(steps: Floats, count: Floats, level: Floats) -> Floats:
    """Sums of steps, whose mean over rows is the mean prediction."""
    points = np.concatenate([np.zeros((1, steps.shape[1])), np.cumsum(steps, axis=0)])
    middle = (points[1:] + points[:-1]) / 2
    curve: Floats = points - (count[:, None] * middle).sum(0) / max(float(count.sum()), 1.0) + level
    return curve


def _by_category(
    column: str, levels: Sequence[str], predictions: Floats, whose: NDArray[np.int64], data: FederatedData
) -> dict[str, Any]:
    sites = {
        name: predictions[:, whose == i].mean(1).tolist()
        for i, name in enumerate(data.clients)
        if (whose == i).sum() >= 5
    }
    return {"column": column, "kind": "category", "x": list(levels), "y": predictions.mean(1).tolist(), "sites": sites}
