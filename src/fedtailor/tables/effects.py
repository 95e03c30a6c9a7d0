"""What a fit means: coefficients, permutation importance of columns, and curves of predictions by column.

Importance: how much worse predictions of held-out rows get when a column is shuffled (Breiman, Mach. Learn. 45, 2001).
Rows are shuffled within their site and never leave it; over sites only sums are taken. Curves: accumulated local
effects of numbers (Apley, Zhu, J. R. Stat. Soc. B 82, 2020), means by category; of every interval a site adds a sum of
differences and a count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.core.task import Metric, Task
from fedtailor.data.tabular.preparation import NumberColumn
from fedtailor.errors import UserError
from fedtailor.experiments.building import task_of
from fedtailor.metrics.library import find
from fedtailor.tables import blend
from fedtailor.tables.blend import Selection
from fedtailor.tables.calibration import calibrate
from fedtailor.tables.candidates import ALONE, folds_of, site_of_rows
from fedtailor.tables.coefficients import fit_coefficients, varies_within_sites
from fedtailor.tables.site_metrics import FEWEST_ROWS, OF_UNITS, at_site, metric_in_units

EFFECTS = "effects.json"
MOST_CURVES = 4  # columns
Floats = NDArray[np.float64]


def table_effects(
    selection: Selection, data: FederatedData, out: Path, seed: int, record: dict[str, Any]
) -> dict[str, Any]:
    """The content of effects.json; coefficients that cannot be computed are None."""
    effects: dict[str, Any] = {}
    try:
        effects["coefficients"] = fit_coefficients(selection.cells, selection.weights, data)
    except (UserError, torch.linalg.LinAlgError, np.linalg.LinAlgError):
        effects["coefficients"] = None
    used = [i for i, cell in enumerate(selection.cells) if cell.label == ALONE or selection.weights[:, i].any()]
    selection = replace(selection, cells=[selection.cells[i] for i in used], weights=selection.weights[:, used])
    calibration = calibration_of_sites(record)

    def predict(rows: Rows) -> Tensor:
        outputs = blend.delivered_outputs(selection, data, rows, out)["personal"]
        if data.task != "classification":
            return outputs
        return torch.from_numpy(calibrate(outputs.numpy(), calibration[site_of_rows(rows)]))

    metric = loss_of(task_of(selection.cells[0].config, data), record["metric"])
    return effects | prediction_effects(predict, data, metric, seed)


def prediction_effects(predict: Predict, data: FederatedData, metric: Metric, seed: int) -> dict[str, Any]:
    """Importance and curves of any model that serves the sites, on held-out rows if there are any."""
    held = data.test if len(data.test.x) >= 2 else data.train
    unit = 1.0 if data.task == "classification" or data.preparation is None else float(data.preparation.target.sd)
    if data.preparation is not None and data.preparation.target.is_log:
        metric, unit = metric_in_units(metric, data.preparation.target), 1.0
    places, varies = places_of(data), varies_within_sites(held)
    inner = {name: at for name, at in places.items() if varies[at].any()}
    importances = importance(predict, held, data.clients, inner, metric, unit, seed) | {
        "held_out": held is data.test,
        "constant": [name for name in places if name not in inner],
    }
    top = [each["column"] for each in importances["columns"] if each["mean"] > 0][:MOST_CURVES]
    drawn = (
        curves(predict, lambda o: in_target_units(o, data), held, data, top, seed) if top and data.preparation else []
    )
    names = [data.preparation.target.name] if data.preparation and data.task != "classification" else list(data.classes)
    return {"importance": importances, "curves": drawn, "outputs": names[1:] if len(names) == 2 else names}


def out_of_fold_predictions(
    selection: Selection, data: FederatedData, seed: int, record: dict[str, Any]
) -> tuple[Floats | None, NDArray[np.int64]]:
    """Out-of-fold predictions of training rows, one number per row as `drift` compares them, and their sites."""
    held = folds_of(data, seed) >= 0
    whose, outputs = site_of_rows(data.train)[held], selection.out_of_fold
    if len(outputs) != len(whose) or not len(whose):  # no site has two rows
        return None, whose
    if data.task == "classification":
        calibration = calibration_of_sites(record)
        outputs = torch.from_numpy(calibrate(outputs.numpy(), calibration[whose]))
    values = in_target_units(outputs, data)
    return (values.max(1) if values.shape[1] > 1 else values[:, 0]), whose


def calibration_of_sites(record: dict[str, Any]) -> Floats:
    """Slope and offset [sites, 2]."""
    return np.array([row.get("calibration", (1.0, 0.0)) for row in record["sites"].values()])


def in_target_units(outputs: Tensor, data: FederatedData) -> Floats:
    """Numbers in units of the target, the probability of the second of two classes, or of each of several."""
    if data.task == "classification":
        p = outputs.softmax(1).double().numpy()
        return p[:, 1:] if p.shape[1] == 2 else p
    numbers: Floats = data.preparation.target.readable(outputs.double()).numpy()
    return numbers


def loss_of(task: Task, shown: str) -> Metric:
    """In what the importance of a column is measured: of classes the log loss, which also sees probabilities far from
    one half; else the metric that is shown."""
    return find(task, "log_loss" if task.kind == "classification" else shown)


Predict = Callable[[Rows], Tensor]  # outputs of the served models for their rows
REPEATS = 5
MOST_ROWS = 500  # of a site
MOST_NUMBERS = 6_000_000  # in all shuffled rows together
MOST_COLUMNS = 30


def sample_rows(rows: Rows, copies: int, seed: int) -> Rows:
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


def stack_versions(rows: Rows, changed: Callable[[int, Tensor], list[Tensor]]) -> Rows:
    """Several versions of the rows of each site, one after another."""
    xs, ys, sizes = [], [], [0]
    for i in range(len(rows.sizes)):
        x, y = rows.of(i)
        versions = changed(i, x)
        xs += versions
        ys += [y] * len(versions)
        sizes.append(sizes[-1] + sum(map(len, versions)))
    return Rows(torch.cat(xs), torch.cat(ys), torch.tensor(sizes, dtype=torch.int64, device="cpu"))


def split_versions(values: Any, every: Rows, sizes: Sequence[int], versions: int) -> list[list[Any]]:
    """Outputs for rows of `stack_versions`, by version and site."""
    return [
        [values[int(every.starts[i]) + k * n : int(every.starts[i]) + (k + 1) * n] for i, n in enumerate(sizes)]
        for k in range(versions)
    ]


def shuffle_column(x: Tensor, at: Sequence[int], rng: np.random.Generator) -> Tensor:
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
    """The loss in the metric by column, largest first: mean and standard deviation over shuffles, and by site."""
    columns = dict(list(columns.items())[:MOST_COLUMNS])
    if not columns:
        return {"metric": metric.name, "rows": 0, "repeats": repeats, "columns": []}
    rows = sample_rows(held, 1 + repeats * len(columns), seed)

    def versions(site: int, x: Tensor) -> list[Tensor]:
        rng = stream(seed, sites[site], "importance")
        return [x, *(shuffle_column(x, at, rng) for at in columns.values() for _ in range(repeats))]

    every = stack_versions(rows, versions)
    outputs = predict(every)
    many, sizes = 1 + repeats * len(columns), rows.sizes.tolist()
    sign = -1.0 if metric.higher_is_better else 1.0
    large = [i for i, size in enumerate(sizes) if size >= FEWEST_ROWS]
    overall, at_sites = measure(metric, outputs, rows, every, many, unit)
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


def measure(
    metric: Metric, outputs: Tensor, rows: Rows, every: Rows, versions: int, unit: float
) -> tuple[Floats, Floats]:
    """The metric of each version over all sites, and at each site [versions, sites].

    Over all sites it is that of all rows where it is a mean over rows, else the mean over sites, by rows.
    """
    sizes = rows.sizes.numpy()
    if metric.per_sample is None:
        parts = [torch.cat(each) for each in split_versions(outputs, every, sizes.tolist(), versions)]
        at_sites = np.array([[at_site(metric, part, rows, i, unit) for i in range(len(sizes))] for part in parts])
        weights = sizes * np.isfinite(at_sites)
        return np.nansum(at_sites * weights, axis=1) / np.maximum(weights.sum(1), 1), at_sites
    losses = metric.per_sample(outputs, every.y).double().numpy()
    by_site = split_versions(losses, every, sizes.tolist(), versions)
    sums = np.array([[each.sum() for each in version] for version in by_site])

    def finish(means: Floats) -> Floats:
        values = torch.from_numpy(means) if metric.finish is None else metric.finish(torch.from_numpy(means))
        figures: Floats = values.numpy() * unit ** OF_UNITS.get(metric.name, 0)
        return figures

    return finish(sums.sum(1) / max(int(sizes.sum()), 1)), finish(sums / np.maximum(sizes, 1))


ENDS = (0.025, 0.975)
MOST_LEVELS = 12
Places = dict[str, list[int]]  # column -> its features


def places_of(data: FederatedData) -> Places:
    """The features of every column; without a table each feature is a column."""
    if data.preparation is None:
        return {name: [j] for j, name in enumerate(data.features or map(str, range(data.shape[0])))}
    out: Places = {}
    at = 0
    for column in data.preparation.columns:
        out[column.name] = list(range(at, at + len(column.features)))
        at += len(column.features)
    return out


def grids(data: FederatedData, inner: Sequence[float] = tuple(np.linspace(0.1, 0.9, 9))) -> dict[str, Floats]:
    """Quantiles of every numeric column over all training rows, standardised, from summed histograms."""
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
    """For each column its points, and the predictions there [points, outputs] over all sites and at each site."""
    places, edges = places_of(data), grids(data)
    rows = sample_rows(held, 2 * len(columns) + MOST_LEVELS, seed)
    drawn_columns = [c for c in data.preparation.columns if c.name in columns]
    bins = {name: _intervals(rows, places[name][0], edges[name]) for name in columns if name in edges}

    def versions(site: int, x: Tensor) -> list[Tensor]:
        first, last = int(rows.starts[site]), int(rows.starts[site + 1])
        out = [x]
        for column in drawn_columns:
            at = places[column.name]
            if column.name in bins:
                k = bins[column.name][first:last]
                out += [
                    _replace_features(x, at[:1], torch.from_numpy(edges[column.name][k + side])[:, None])
                    for side in (0, 1)
                ]
            else:
                levels = torch.from_numpy(column.matrix[:MOST_LEVELS])
                out += [_replace_features(x, at, level.expand(len(x), -1)) for level in levels]
        return out

    every = stack_versions(rows, versions)
    predictions, sizes = readable(predict(every)), rows.sizes.tolist()
    whose = np.repeat(np.arange(len(sizes)), sizes)
    many = len(every.x) // max(len(rows.x), 1)
    blocks: list[Floats] = [np.concatenate(each) for each in split_versions(predictions, every, sizes, many)]
    base, blocks = blocks[0], blocks[1:]
    drawn = []
    for column in drawn_columns:
        if isinstance(column, NumberColumn):
            low, high, *blocks = blocks
            drawn.append(_accumulate(column, edges[column.name], bins[column.name], high - low, base, whose, data))
        else:
            many = min(len(column.categories), MOST_LEVELS)
            own, blocks = blocks[:many], blocks[many:]
            drawn.append(_by_category(column.name, column.categories[:many], np.stack(own), whose, data))
    return sorted(drawn, key=lambda each: list(columns).index(each["column"]))


def _replace_features(x: Tensor, at: Sequence[int], values: Tensor) -> Tensor:
    out = x.clone()
    out[:, torch.tensor(list(at), dtype=torch.int64, device="cpu")] = values.to(x.dtype)
    return out


def _intervals(rows: Rows, feature: int, edges: Floats) -> NDArray[np.int64]:
    """The interval of every row; values outside belong to the outer ones."""
    x = rows.x[:, feature].numpy()
    return np.clip(np.searchsorted(edges, x, side="left") - 1, 0, max(len(edges) - 2, 0)).astype(np.int64)


def _accumulate(
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
