"""The record of a fit of tables: which models serve each site, how certain that is, and test figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core.algorithm import reply_names
from fedtailor.core.data import FederatedData, Rows
from fedtailor.experiments.building import task_of
from fedtailor.metrics.library import known_metrics
from fedtailor.metrics.summary import share_hurt, summarise
from fedtailor.studies.grid import Cell
from fedtailor.tables import blend
from fedtailor.tables.blend import LEAST, Selection
from fedtailor.tables.boosted_trees import KINDS, ON_TOP, TREES
from fedtailor.tables.calibration import calibrate, fit_calibration
from fedtailor.tables.candidates import ALONE, COMMON, folds_of, site_of_rows
from fedtailor.tables.intervals import LEVELS, half_widths, interval_errors
from fedtailor.tables.site_metrics import bootstrap_intervals, bootstrap_rows, fairness, select_metric, site_metrics


def table_record(
    selection: Selection, data: FederatedData, out: Path, seed: int, metric_name: str = ""
) -> dict[str, Any]:
    """The content of fit.json without settings and dropped candidates."""
    sure = certainty(selection, data, seed)
    is_class, task = data.task == "classification", task_of(selection.cells[0].config, data)
    main_metric = select_metric(task, metric_name)
    metric, higher = main_metric.name, main_metric.higher_is_better
    outputs = blend.delivered_outputs(selection, data, data.test, out)
    if is_class:
        of_rows = sure.calibration[site_of_rows(data.test)]
        outputs["personal"] = torch.from_numpy(calibrate(outputs["personal"].numpy(), of_rows))
    outputs["baseline"] = _baseline(data)
    unit = data.preparation.target.sd if data.task == "regression" else 1.0
    rows, per_unit = data.test, unit
    if data.preparation.target.is_log:  # figures are of the numbers themselves
        target = data.preparation.target
        outputs, per_unit = {key: target.readable(output) for key, output in outputs.items()}, 1.0
        rows = Rows(rows.x, target.readable(rows.y), rows.starts)
    metrics = site_metrics(task, main_metric, outputs, rows, per_unit)
    if "common" not in outputs:  # there was no time for it
        nowhere = [float("nan")] * len(data.clients)
        metrics = {name: each | {"common": nowhere} for name, each in metrics.items()}
    figures = metrics[metric]
    bounds = bootstrap_intervals(
        main_metric, figures, bootstrap_rows(main_metric, outputs, rows, per_unit, seed), data.test.sizes.tolist(), seed
    )
    sites: dict[str, dict[str, Any]] = {}
    of_shared = np.zeros(len(data.clients)) if selection.shared is None else selection.shared
    for i, name in enumerate(data.clients):
        weights = {
            cell.folder.name: float(weight)
            for cell, weight in zip(selection.cells, selection.weights[i], strict=True)
            if weight >= LEAST
        }
        whole = sum(weights.values())
        weights = {run: weight / whole for run, weight in weights.items()}
        trees = {kind: weight for kind, weight in selection.trees[i].items() if weight >= LEAST}
        sites[name] = {
            "run": max(weights, key=lambda run: weights[run]),
            "weights": weights,
            "parts": {kind: weight / sum(trees.values()) for kind, weight in trees.items()},
            "trees": {kind: blend.trees_path(out, i, kind).name for kind in trees if kind in (TREES, ON_TOP)},
            **({"shared_trees": float(of_shared[i])} if of_shared[i] >= LEAST else {}),
            "served": describe_served(selection, i),
            "alone_by": selection.alone[i],
            "train": int(data.train.sizes[i]),
            "val": 0,
            "test": int(data.test.sizes[i]),
            **{key: values[i] for key, values in figures.items()},
            **bounds["sites"][i],
            "metrics": {name: {key: values[i] for key, values in each.items()} for name, each in metrics.items()},
            **sure.of(i, unit),
            "gains": {"error": {"served": {"mean": selection.gains[i][0], "sd": selection.gains[i][1]}}},
        }
    by_label = {cell.label: cell for cell in selection.cells}
    totals = selection.weights.sum(0)
    shared_ones = [i for i, cell in enumerate(selection.cells) if cell.label != ALONE] or [0]
    best = selection.cells[max(shared_ones, key=lambda i: totals[i])]

    def mean(key: str) -> float:
        return summarise([s[key] for s in sites.values()], higher_is_better=higher).mean

    return {
        "kind": "last",
        "metric": metric,
        "higher_is_better": higher,
        "task": data.task,
        "data": data.name,
        "model": "linear and trees" if any(s["trees"] or "shared_trees" in s for s in sites.values()) else "linear",
        **({"shared_trees": blend.shared_trees_path(out).name} if (of_shared >= LEAST).any() else {}),
        "rounds": 1,
        "target": data.preparation.target.name,
        "sites": sites,
        "newcomers": best.folder.name,
        "common": by_label.get(COMMON, by_label[ALONE]).folder.name,
        "shared": {cell.label: sharing_record(cell) for cell in selection.cells},
        "means": {key: mean(key) for key in ("alone", "common", "personal", "baseline")},
        "hurt": share_hurt(
            [s["personal"] for s in sites.values()], [s["alone"] for s in sites.values()], higher_is_better=higher
        ),
        "ci": bounds["ci"],
        "differences": bounds["differences"],
        "plots": plots_of(outputs["personal"], replace(data, test=rows), per_unit),
        "card": data_card(data),
        "fairness": fairness(data.clients, figures["personal"], data.test.sizes.tolist(), higher_is_better=higher),
        "metrics": {
            name: known_metrics(task)[name].higher_is_better for name in metrics if name in known_metrics(task)
        },
        "notes": list(data.notes),
        **sure.of_newcomers(unit),
    }


@dataclass(frozen=True)
class Certainty:
    """From out-of-fold outputs: calibration of classes [sites, 2], half-widths of intervals [sites + 1, levels]."""

    calibration: NDArray[np.float64]
    half_widths: NDArray[np.float64] | None

    def of(self, site: int, unit: float) -> dict[str, Any]:
        calibration = {} if (self.calibration == [1.0, 0.0]).all() else {"calibration": self.calibration[site].tolist()}
        widths = {} if self.half_widths is None else {"half_widths": (unit * self.half_widths[site]).tolist()}
        return calibration | widths

    def of_newcomers(self, unit: float) -> dict[str, Any]:
        if self.half_widths is None:
            return {}
        return {"levels": list(LEVELS), "half_widths": (unit * self.half_widths[-1]).tolist()}


def certainty(selection: Selection, data: FederatedData, seed: int) -> Certainty:
    """Calibration and interval widths from out-of-fold outputs of the served models."""
    folds, sites = folds_of(data, seed), len(data.clients)
    held = folds >= 0
    site, outputs, y = site_of_rows(data.train)[held], selection.out_of_fold.numpy(), data.train.y.numpy()[held]
    if len(y) != len(outputs):  # no site has two rows
        return Certainty(np.tile([1.0, 0.0], (sites, 1)), None)
    if data.task == "classification":
        return Certainty(fit_calibration(outputs, y, site, folds[held], sites), None)
    distance = interval_errors(np.exp(outputs), y, "root") if data.task == "count" else np.abs(y - outputs)
    return Certainty(np.tile([1.0, 0.0], (sites, 1)), half_widths(distance[:, 0], site, folds[held], sites))


BOOSTED = "boosted"  # a mixed model with the trees of all sites on it


def describe_served(selection: Selection, site: int) -> str:
    """The parts of a site's model, largest first."""
    linear = selection.trees[site].get("linear", 0.0)
    parts: dict[str, float] = {kind: w for kind, w in selection.trees[site].items() if kind != "linear"}
    for cell, weight in zip(selection.cells, selection.weights[site], strict=True):
        name = cell.label.partition(",")[0]  # mixed models of several kinds are one
        parts[name] = parts.get(name, 0.0) + linear * float(weight)
    if selection.shared is not None and selection.shared[site]:
        boosted = linear * float(selection.shared[site])  # of the linear part of these candidates
        at = max((name for name in parts if name not in KINDS), key=lambda name: parts[name])
        parts[BOOSTED], parts[at] = boosted, parts[at] - boosted
    parts = {name: weight for name, weight in parts.items() if weight >= 0.05} or parts
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    if len(ordered) == 1 or ordered[0][1] > 0.95:
        return ordered[0][0]
    return " + ".join(f"{100 * weight:.0f} % {name}" for name, weight in ordered)


def _baseline(data: FederatedData) -> torch.Tensor:
    """The mean of each site's training rows, or its class shares with one row of each class added.

    For counts, the logarithm of the mean with half an event added.
    """
    out = torch.zeros((len(data.test.x), data.outputs), dtype=torch.float64, device="cpu")
    for i in range(len(data.clients)):
        a, b = int(data.test.starts[i]), int(data.test.starts[i + 1])
        y = data.train.of(i)[1]
        if data.task == "classification":
            count = torch.bincount(y, minlength=data.outputs).double() + 1
            out[a:b] = (count / count.sum()).log()
        elif len(y):
            out[a:b] = ((y.sum(0) + 0.5) / len(y)).log() if data.task == "count" else y.mean(0)
    return out


def sharing_record(cell: Cell) -> dict[str, str]:
    """What leaves a site and what stays private."""
    program = algorithms.make(cell.config.algorithm.name, cell.config.algorithm.options)
    return {"sent": ", ".join(reply_names(program)) or "nothing", "private": program.private}


FAR = 0.5  # standard deviations, of a mean from that of all sites
MOST = 3  # features that are named of a site


def data_card(data: FederatedData) -> dict[str, dict[str, Any]]:
    """Of each site: rows, the target's mean or share of a class, and the features that drift, furthest first.

    Only means and counts of a site's training rows are compared. A drift is reported if it is large and significant.
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
        best = 1 if data.outputs == 2 else int(counts.argmax())  # of two the one whose probability is predicted
        return f"{100 * counts[best] / counts.sum():.0f} % {data.classes[best] if data.classes else best}"
    target = None if data.preparation is None else data.preparation.target
    if target is not None and target.task == "regression":
        mean = target.mean + target.sd * y.mean()
        return f"{np.exp(mean):.4g} on geometric average" if target.is_log else f"{mean:.4g} on average"
    return f"{y.mean():.4g} on average"


Floats = NDArray[np.float64]
BINS, MOST_CURVES, MOST_SITES, POINTS = 10, 6, 30, 60
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def plots_of(outputs: Tensor, data: FederatedData, unit: float) -> dict[str, Any]:
    """Points of the served models' plots; nothing where test rows do not suffice."""
    starts = data.test.starts.tolist()
    parts = {name: (a, b) for name, (a, b) in zip(data.clients, pairwise(starts), strict=True) if b > a}
    if data.task in ("regression", "count"):
        residuals = unit * (data.test.y - (outputs.exp() if data.task == "count" else outputs))[:, 0].numpy()
        largest = sorted(parts, key=lambda name: parts[name][0] - parts[name][1])[:MOST_SITES]
        shown = {name: place for name, place in parts.items() if name in largest}
        some = {name: residuals[a:b] for name, (a, b) in shown.items() if b - a >= len(QUANTILES)}
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
