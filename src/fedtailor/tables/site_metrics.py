"""Test figures: every metric of the task at every site, with bootstrap confidence intervals over rows and sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.core.data import Rows
from fedtailor.core.random import stream
from fedtailor.core.task import Metric, Task
from fedtailor.data.tabular.preparation import TargetColumn
from fedtailor.metrics.library import find, known_metrics
from fedtailor.metrics.summary import summarise

Floats = NDArray[np.float64]
DRAWS = 200
LARGE = 2000  # rows of a site from which means are drawn from a normal distribution
MANY = 100  # sites, above which metrics that are no means are computed only if asked for
FEWEST_ROWS = 10  # of a site, below which it gets no bootstrap interval
SOME = 8  # sites, from which the bootstrap is over sites
TAIL = 0.025
OF_UNITS = {"rmse": 1, "mae": 1, "mse": 2}  # the power of the target's unit in a metric


def select_metric(task: Task, name: str) -> Metric:
    """The metric to report: the named one, or the task's first."""
    return find(task, name or task.metrics[0])


def site_metrics(
    task: Task, metric: Metric, outputs: Mapping[str, Tensor], rows: Rows, unit: float
) -> dict[str, dict[str, list[float]]]:
    """Metric -> model (personal, alone, ...) -> value by site; NaN where a site has too few rows."""
    sites = len(rows.sizes)
    known = {metric.name: metric} | known_metrics(task)
    wanted = [m for m in known.values() if m.per_sample is not None or m.name == metric.name or sites <= MANY]
    return {m.name: {key: at_sites(m, values, rows, unit) for key, values in outputs.items()} for m in wanted}


def at_sites(metric: Metric, outputs: Tensor, rows: Rows, unit: float) -> list[float]:
    """One metric of every site's rows."""
    if metric.per_sample is None or not len(outputs):
        return [at_site(metric, outputs, rows, i, unit) for i in range(len(rows.sizes))]
    losses = metric.per_sample(outputs, rows.y).double()
    means = torch.segment_reduce(losses, "sum", lengths=rows.sizes) / rows.sizes
    values = means if metric.finish is None else metric.finish(means)
    return (values * unit ** OF_UNITS.get(metric.name, 0)).tolist()


def at_site(metric: Metric, outputs: Tensor, rows: Rows, site: int, unit: float) -> float:
    a, b = int(rows.starts[site]), int(rows.starts[site + 1])
    if a == b:
        return math.nan
    o, y = outputs[a:b], rows.y[a:b]
    if metric.per_sample is not None:
        mean = metric.per_sample(o, y).double().mean()
        value = float(mean if metric.finish is None else metric.finish(mean))
    else:
        assert metric.of_all is not None
        value = float(metric.of_all(o, y))
    return value * unit ** OF_UNITS.get(metric.name, 0)


def metric_in_units(metric: Metric, target: TargetColumn) -> Metric:
    """The metric in units of the target, where the model's outputs have other units."""
    of_row, of_all = metric.per_sample, metric.of_all
    return replace(
        metric,
        per_sample=of_row and (lambda o, y: of_row(target.readable(o), target.readable(y))),
        of_all=of_all and (lambda o, y: of_all(target.readable(o), target.readable(y))),
    )


def bootstrap_rows(
    metric: Metric, outputs: Mapping[str, Tensor], rows: Rows, unit: float, seed: int
) -> dict[str, Floats]:
    """Bootstrap over rows: for each key the metric [sites, draws] on the same rows drawn with replacement.

    Metrics that are no means (except AUROC of two classes), and sites with few rows, keep their one value.
    """
    rng, keys, sites = stream(seed, "bootstrap"), list(outputs), len(rows.sizes)
    out = {key: np.full((sites, DRAWS), np.nan) for key in keys}
    is_auroc = metric.name == "auroc" and next(iter(outputs.values())).shape[1] == 2
    for i in range(sites):
        a, b = int(rows.starts[i]), int(rows.starts[i + 1])
        if b - a < FEWEST_ROWS:
            for key in keys:
                out[key][i] = at_site(metric, outputs[key], rows, i, unit)
            continue
        y = rows.y[a:b]
        if metric.per_sample is None and not is_auroc:
            for key in keys:
                out[key][i] = at_site(metric, outputs[key], rows, i, unit)
            continue
        if is_auroc:
            at = rng.integers(b - a, size=(DRAWS, b - a))
            for key in keys:
                scores = (outputs[key][a:b, 1] - outputs[key][a:b, 0]).numpy()
                out[key][i] = [_auroc(scores[draw], y.numpy()[draw]) for draw in at]
            continue
        assert metric.per_sample is not None
        values = np.stack([metric.per_sample(outputs[key][a:b], y).double().numpy() for key in keys])
        means = _means(values, rng)
        for key, drawn in zip(keys, means, strict=True):
            finished = drawn if metric.finish is None else metric.finish(torch.from_numpy(drawn)).numpy()
            out[key][i] = finished * unit ** OF_UNITS.get(metric.name, 0)
    return out


def _means(values: Floats, rng: np.random.Generator) -> Floats:
    """[keys, draws]: means of rows drawn with replacement."""
    rows = values.shape[1]
    if rows > LARGE:
        spread = np.atleast_2d(np.cov(values)) / rows
        drawn = rng.multivariate_normal(values.mean(1), spread, size=DRAWS, method="eigh").T
        return np.maximum(drawn, 0.0)
    at = rng.integers(rows, size=(DRAWS, rows))
    return values[:, at].mean(2)


def _auroc(scores: Floats, y: NDArray[np.int64]) -> float:
    positive = int(y.sum())
    if not 0 < positive < len(y):
        return math.nan
    ranks = rankdata(scores)[y == 1].sum()
    return float((ranks - positive * (positive + 1) / 2) / (positive * (len(y) - positive)))


def percentile_interval(drawn: Floats) -> list[float] | None:
    """The middle 95 % of draws; None where there are none."""
    known = drawn[np.isfinite(drawn)]
    return [float(v) for v in np.quantile(known, [TAIL, 1 - TAIL])] if len(known) > 1 else None


def bootstrap_intervals(
    metric: Metric, figures: Mapping[str, Sequence[float]], draws: Mapping[str, Floats], sizes: Sequence[int], seed: int
) -> dict[str, Any]:
    """Bootstrap confidence intervals of means and differences, and by site.

    With eight sites or more the bootstrap is over sites, with all of their rows; with fewer it is over rows. Sites with
    very few rows get none.
    """
    sign = 1.0 if metric.higher_is_better else -1.0
    sites = len(next(iter(draws.values())))
    some = [i for i in range(sites) if math.isfinite(figures["personal"][i])] or list(range(sites))
    rng = stream(seed, "bootstrap", "sites")
    picked = rng.choice(some, size=(DRAWS, len(some)))
    is_many = len(some) >= SOME
    means = {
        key: np.array([_mean(np.array(figures[key])[at] if is_many else each[:, d]) for d, at in enumerate(picked)])
        for key, each in draws.items()
    }
    others = [key for key in draws if key != "personal"]
    differences = {}
    for key in others:
        pairs = zip(figures["personal"], figures[key], strict=True)
        gained = sign * _mean(np.array([mine - theirs for mine, theirs in pairs]))
        differences[key] = {"gain": gained, "ci": percentile_interval(sign * (means["personal"] - means[key]))}
    of_sites = [
        {
            "ci": percentile_interval(draws["personal"][i]),
            "gain_ci": percentile_interval(sign * (draws["personal"][i] - draws["alone"][i])),
        }
        if size >= FEWEST_ROWS
        else {"ci": None, "gain_ci": None}
        for i, size in enumerate(sizes)
    ]
    return {
        "ci": {key: percentile_interval(each) for key, each in means.items()},
        "differences": differences,
        "sites": of_sites,
    }


def fairness(
    names: Sequence[str], values: Sequence[float], sizes: Sequence[int] | None = None, *, higher_is_better: bool
) -> dict[str, Any]:
    """The worst site, the worst tenth and the spread, of the sites with enough rows if there are any."""
    known = [(v, name) for v, name in zip(values, names, strict=True) if math.isfinite(v)]
    enough = {name for name, size in zip(names, sizes or (), strict=False) if size >= FEWEST_ROWS}
    known = [(v, name) for v, name in known if name in enough] or known
    if not known:
        return {}
    summary = summarise([v for v, _ in known], higher_is_better=higher_is_better)
    worst, name = (min if higher_is_better else max)(known)
    return {"worst": name, "worst_value": worst, "worst_tenth": summary.worst_tenth, "spread": summary.std} | {
        "sites": len(known)
    }


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def is_noise(ci: Sequence[float]) -> bool:
    """Whether the confidence interval of a difference includes zero."""
    return not (ci[0] > 0 or ci[1] < 0)
