"""What the sites' rows are like before anything is learnt: sizes, and how far each feature is from all sites'."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from fedtailor.core.data import FederatedData

FAR = 0.5  # standard deviations, of a mean from that of all sites
MOST = 3  # features that are named of a site


def data_card(data: FederatedData) -> dict[str, dict[str, Any]]:
    """Of each site: rows, the target's mean or most frequent class, and the features that drift, furthest first.

    Only means and counts of a site's training rows are compared. A drift is told if it is large and beyond chance.
    """
    x, y = data.train.x.numpy().astype(np.float64), data.train.y.numpy()
    mean, sd = x.mean(0), np.where(x.std(0) > 1e-12, x.std(0), 1.0)
    out: dict[str, dict[str, Any]] = {}
    for name, (a, b) in zip(data.clients, pairwise(data.train.starts.tolist()), strict=True):
        if a == b:
            out[name] = {"rows": 0, "target": "", "drift": []}
            continue
        shifts = (x[a:b].mean(0) - mean) / sd
        is_far = np.abs(shifts) > np.maximum(FAR, 3 / np.sqrt(b - a))
        far = sorted(np.flatnonzero(is_far).tolist(), key=lambda j: -abs(shifts[j]))[:MOST]
        drift = [[data.features[j], round(float(shifts[j]), 3)] for j in far]
        out[name] = {"rows": b - a, "target": _target(y[a:b], data), "drift": drift}
    return out


def _target(y: np.ndarray, data: FederatedData) -> str:
    if data.task == "classification":
        counts = np.bincount(y, minlength=data.outputs)
        best = int(counts.argmax())
        return f"{100 * counts[best] / counts.sum():.0f} % {data.classes[best] if data.classes else best}"
    target = None if data.preparation is None else data.preparation.target
    if target is not None and target.task == "regression":
        mean = target.mean + target.sd * y.mean()
        return f"{np.exp(mean):.4g} on geometric average" if target.is_log else f"{mean:.4g} on average"
    return f"{y.mean():.4g} on average"
