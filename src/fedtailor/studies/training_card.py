"""What a fit keeps of the training rows, to compare later ones with: counts by interval and category, means, gaps.

Of each site its own; the intervals are common ones, from counts that are summed over sites. No row is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData
from fedtailor.data.tabular.preparation import NumberColumn
from fedtailor.studies.curves import places_of

CARD = "training.json"
Floats = NDArray[np.float64]
QUANTILES = tuple(np.linspace(0.1, 0.9, 9))
MARKS = 480


def quantiles(parts: Sequence[Floats], wanted: Sequence[float] = QUANTILES) -> Floats:
    """Distinct quantiles of the values of all sites, from histograms that are summed."""
    known = [part for part in parts if len(part)]
    if not known:
        return np.zeros(0)
    low, high = min(float(p.min()) for p in known), max(float(p.max()) for p in known)
    if low == high:
        return np.zeros(0)
    marks = np.linspace(low, high, MARKS + 1)
    share = np.cumsum(sum(np.histogram(p, marks)[0] for p in known)) / sum(map(len, known))
    edges = [float(marks[min(int(np.searchsorted(share, q - 1e-12)), MARKS - 1) + 1]) for q in wanted]
    return np.unique([edge for edge in edges if edge < high])


def counted(values: Floats, edges: Sequence[float]) -> dict[str, Any]:
    """How many values lie in each interval, and their mean and spread."""
    where = np.searchsorted(np.asarray(edges, dtype=np.float64), values, side="left")
    return {
        "counts": np.bincount(where, minlength=len(edges) + 1).tolist(),
        "mean": float(values.mean()) if len(values) else 0.0,
        "sd": float(values.std()) if len(values) else 0.0,
    }


def training_card(data: FederatedData, predictions: Floats | None, whose: NDArray[np.int64]) -> dict[str, Any]:
    """As training.json has it; `predictions` are as people read them, of training rows by models without them."""
    places, bounds = places_of(data), list(pairwise(data.train.starts.tolist()))
    x = data.train.x.numpy().astype(np.float64)
    columns: dict[str, dict[str, Any]] = {}
    sites: dict[str, dict[str, Any]] = {
        n: {"rows": b - a, "columns": {}} for n, (a, b) in zip(data.clients, bounds, strict=True)
    }
    for column in data.preparation.columns:
        at = places[column.name]
        if isinstance(column, NumberColumn):
            edges = quantiles([x[a:b, at[0]] for a, b in bounds]).tolist()
            columns[column.name] = {"kind": "number", "edges": edges}
            for name, (a, b) in zip(data.clients, bounds, strict=True):
                own = counted(x[a:b, at[0]], edges)
                sites[name]["columns"][column.name] = own | {"missing": column.sites[name].missing}
        else:
            columns[column.name] = {"kind": "category", "categories": list(column.categories)}
            for name, (a, b) in zip(data.clients, bounds, strict=True):
                sites[name]["columns"][column.name] = {"counts": x[a:b, at].sum(0).astype(int).tolist()}
    edges = [] if predictions is None else quantiles([predictions[whose == i] for i in range(len(bounds))]).tolist()
    for i, name in enumerate(data.clients):
        sites[name]["prediction"] = None if predictions is None else counted(predictions[whose == i], edges)
    return {"columns": columns, "prediction": {"edges": edges}, "sites": sites}
