"""How good a newcomer's model is expected to be with more or fewer rows.

Below the rows that it has: models of parts of its rows, measured on the others. Beyond: by the spread of coefficients
that the mixed model learned. With n rows, and H the mean of x x' (times p (1 - p) for two classes), the coefficients
are unknown up to V = L (I + n L' H L)^-1 L'. That adds noise * tr(H V) to the squared error, or tr(H V) / 2 to the log
loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core.client import onboard
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.environment import Environment
from fedtailor.core.experiment import Experiment
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics.reml import posterior

SIZES = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
DRAWS = 10
LEAST_HELD = 0.2  # of the rows, on which models of the others are measured
FEWEST = 10  # rows, below which there is no curve
LITTLE = 0.01  # gain from twice as many rows, below which more do not help
TASKS = ("regression", "classification", "count")


def learning_curve(
    experiment: Experiment, own: FederatedData, server: Tree, common: Params | None, seed: int
) -> dict[str, Any] | None:
    """Figures by number of rows, what is expected beyond them, and a sentence; None where a curve cannot be had."""
    x, y = (torch.cat([getattr(getattr(own, split), part) for split in ("train", "val", "test")]) for part in "xy")
    is_known = own.task in TASKS and own.preparation is not None and experiment.algorithm.onboards_fitted
    if not is_known or len(x) < FEWEST:
        return None
    alone = replace(experiment, algorithm=algorithms.make("linearalone", {}))
    methods = {"alone": (alone, alone.algorithm.server_init(experiment.model)), "personal": (experiment, server)}
    most = int((1 - LEAST_HELD) * len(x))
    points = []
    for n in sorted({*(size for size in SIZES if size < most), most}):
        losses: dict[str, list[Tensor]] = {name: [] for name in (*methods, *(["common"] if common else []))}
        for draw in range(DRAWS):
            order = torch.from_numpy(stream(seed, "curve", n, draw).permutation(len(x)))
            held = order[n:]
            predictions = {
                name: _newcomer_outputs(*method, _part(own, x, y, order[:n]), x[held])
                for name, method in methods.items()
            }
            if common:
                predictions["common"] = experiment.algorithm.predict(experiment.model, common, x[held])
            for name, outputs in predictions.items():
                row = torch.full((len(x),), torch.nan, dtype=torch.float64, device="cpu")
                row[held] = _losses(outputs.double(), y[held], own)
                losses[name].append(row)
        points.append({"rows": n} | {name: _figure(torch.stack(each), own.task) for name, each in losses.items()})
    excess = _excess(experiment, server, x, own)
    curve: dict[str, Any] = {"metric": "log loss" if own.task == "classification" else "rmse", "points": points}
    if excess is not None:
        curve |= _expected(points[-1], excess, len(own.train.x), own.task)
    return curve | {"sentence": _sentence(curve)}


def _part(own: FederatedData, x: Tensor, y: Tensor, at: Tensor) -> FederatedData:
    train, empty = (Rows(x[rows], y[rows], torch.tensor([0, len(rows)], device="cpu")) for rows in (at, at[:0]))
    return replace(own, train=train, val=empty, test=empty)


def _newcomer_outputs(experiment: Experiment, server: Tree, rows: FederatedData, x: Tensor) -> Tensor:
    """Outputs of the model that a newcomer with these rows gets."""
    of_newcomer = replace(experiment, data=rows, unseen=None, environment=Environment())
    with torch.no_grad():
        return experiment.algorithm.predict(experiment.model, onboard(of_newcomer, 0, server, 0), x)


def _losses(outputs: Tensor, y: Tensor, own: FederatedData) -> Tensor:
    """Log loss, or squared error in units of the target, of each row."""
    if own.task == "classification":
        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")
    target = own.preparation.target
    return (target.readable(outputs) - target.true(y)).square()[:, 0]


def _figure(losses: Tensor, task: str) -> dict[str, float]:
    """The mean over draws and rows, and its standard error by rows, which are more alike than draws."""
    by_row = losses.nanmean(0)
    by_row = by_row[~by_row.isnan()]
    mean, error = float(losses.nanmean()), float(by_row.std()) / math.sqrt(len(by_row))
    if task == "classification":
        return {"mean": mean, "error": error}
    root = math.sqrt(mean)
    return {"mean": root, "error": error / (2 * root) if root else 0.0}


def _excess(experiment: Experiment, server: Tree, x: Tensor, own: FederatedData) -> Any:
    """What is expected to be lost by having n rows and not all, as a function of n; None where it is not known."""
    target = own.preparation.target
    if not isinstance(server, Mapping) or "factor" not in server or target.is_log or own.outputs > 2:
        return None
    factor = server["factor"].double()
    design = torch.cat([x.double(), torch.ones_like(x[:, :1], dtype=torch.float64)], dim=1)[:, : len(factor)]
    if own.task == "classification":
        p = (design @ server["beta"].double()).sigmoid()
        h, scale = (design * p * (1 - p)).mT @ design / len(x), 0.5
    elif own.task == "regression":
        h, scale = design.mT @ design / len(x), float(server["noise"]) * target.sd**2
    else:
        return None
    return lambda n: scale * float((h * posterior(n * h, factor)[0]).sum())


def _expected(last: Mapping[str, Any], excess: Any, rows: int, task: str) -> dict[str, Any]:
    """The curve beyond, through the last point that was measured; and from where on more rows gain little."""
    power = 1 if task == "classification" else 2
    floor = last["personal"]["mean"] ** power - excess(last["rows"])

    def at(n: float) -> float:
        return float(max(floor + excess(n), 0.0) ** (1 / power))

    grid = np.unique(np.geomspace(1, 1e6, 200).astype(int)).tolist()
    enough = next((n for n in grid if at(n) - at(2 * n) < LITTLE * at(n)), None)
    wanted = [rows * factor for factor in (1, 2, 4, 8)]
    return {
        "expected": [{"rows": n, "personal": at(n)} for n in wanted],
        "enough": enough,
        "at_its_rows": {"rows": rows, "mean": at(rows), "error": last["personal"]["error"]},
    }


def _sentence(curve: Mapping[str, Any]) -> str:
    last, metric = curve["points"][-1], curve["metric"]
    now = curve.get("at_its_rows", {"rows": last["rows"], **last["personal"]})
    others = f"alone {last['alone']['mean']:.3g}"
    others = f"common model {last['common']['mean']:.3g}, {others}" if "common" in last else others
    words = (
        f"with {now['rows']} rows the personal model is expected at {metric} {now['mean']:.3g} ± {now['error']:.2g} "
        f"({others})"
    )
    if curve.get("enough") is not None:
        few = "more rows are not expected to help it: the sites of the fit are alike"
        many = f"beyond about {curve['enough']} rows, twice as many gain less than 1 %"
        words += f"; {few if curve['enough'] <= 1 else many}"
    better = [p["rows"] for p in curve["points"] if p["alone"]["mean"] < p["personal"]["mean"] - p["personal"]["error"]]
    if last["rows"] in better:
        words += f"; from about {better[0]} rows on its model alone is better: the fit has no site like it, update it"
    return words
