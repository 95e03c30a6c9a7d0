"""What the plots of a fit show, from test rows: calibration and ROC of two classes, residuals of numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData

Floats = NDArray[np.float64]
BINS, MOST_CURVES, MOST_SITES, POINTS = 10, 6, 30, 60
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def plots_of(outputs: Tensor, data: FederatedData, unit: float) -> dict[str, Any]:
    """Points of the served models' plots; nothing where test rows do not suffice."""
    starts = data.test.starts.tolist()
    parts = {name: (a, b) for name, (a, b) in zip(data.clients, pairwise(starts), strict=True) if b > a}
    if data.task in ("regression", "count"):
        residuals = unit * (data.test.y - (outputs.exp() if data.task == "count" else outputs))[:, 0].numpy()
        some = {name: residuals[a:b] for name, (a, b) in list(parts.items())[:MOST_SITES] if b - a >= len(QUANTILES)}
        return {"residuals": {name: np.quantile(each, QUANTILES).tolist() for name, each in some.items()}}
    if data.outputs != 2 or len(outputs) < 5 * BINS:
        return {}
    p, y = outputs.softmax(1)[:, 1].numpy(), data.test.y.numpy()
    bins = [at for at in np.array_split(np.argsort(p, kind="stable"), BINS) if len(at)]
    largest = sorted(parts, key=lambda name: parts[name][0] - parts[name][1])[:MOST_CURVES]
    curves = {name: _roc(p[slice(*parts[name])], y[slice(*parts[name])]) for name in largest}
    return {
        "reliability": [[float(p[at].mean()), float(y[at].mean()), len(at)] for at in bins],
        "roc": {"all sites": _roc(p, y)} | {name: curve for name, curve in curves.items() if curve},
    }


def _roc(scores: Floats, y: NDArray[np.int64]) -> list[list[float]]:
    """False and true positives by threshold, thinned."""
    positive = int(y.sum())
    if not 0 < positive < len(y):
        return []
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)  # of rows with equal scores
    hits, misses = np.cumsum(y[order])[last] / positive, np.cumsum(1 - y[order])[last] / (len(y) - positive)
    at = np.unique(np.linspace(0, len(hits) - 1, min(POINTS, len(hits))).astype(int))
    return [[0.0, 0.0], *([float(misses[i]), float(hits[i])] for i in at)]
