"""A fit to tables: solved linear and mixed models, boosted trees where rows suffice, and a blend for each site.

Everything is chosen on out-of-fold predictions of the training rows; test rows are read for the figures alone. What is
delivered was trained on all training rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.numerics.blending import KNOWN
from fedtailor.serving.trees import ON_TOP, TREES, TREES_FOLDER, Trees, tree_outputs
from fedtailor.studies import boosting
from fedtailor.studies.cross_fitting import all_in_training, folds_of, outputs_of, site_of_rows
from fedtailor.studies.grid import Cell, CellListener
from fedtailor.studies.linear_candidates import ALONE, COMMON, Clock, OutOfTime, cross_fitted, delivered
from fedtailor.studies.model_selection import chance, gains
from fedtailor.studies.stacking import Candidates, row_losses, stack

MOST_COEFFICIENTS = 400
LEAST = 0.01  # weights below this are left out


def is_for(data: FederatedData, tables: Mapping[str, Any], algorithm: str) -> bool:
    """Whether these are rows of a table, for which nothing was prescribed."""
    if algorithm != "auto" or "model" in tables or "task" in tables or data.preparation is None:
        return False
    is_known = data.is_plain and data.task in ("classification", "regression", "count") and len(data.shape) == 1
    return is_known and (data.shape[0] + 1) * max(data.outputs - 1, 1) <= MOST_COEFFICIENTS


@dataclass(frozen=True)
class Selection:
    """What the candidates say out of fold, of test rows, and who serves whom."""

    cells: list[Cell]
    weights: NDArray[np.float64]  # [sites, cells], of the linear part
    trees: list[dict[str, float]]  # per site by kind, and "linear"
    alone: list[str]  # per site the best model of its own
    gains: list[tuple[float, float]]  # over that, out of fold: mean and standard error
    out_of_fold: Tensor  # of the served models
    dropped: list[dict[str, Any]]


def select(
    cells: list[Cell],
    data: FederatedData,
    folds: NDArray[np.int64],
    outputs: dict[str, Tensor],
    seed: int,
    clock: Clock,
    out: Path,
) -> Selection:
    """Weights, trees, and the promise that no site is knowingly worse off than alone."""
    is_class = data.task == "classification"
    dropped: list[dict[str, Any]] = []
    used = [cell for cell in cells if cell.label in outputs]
    held = torch.from_numpy(folds >= 0)
    y, site = data.train.y[held], torch.from_numpy(site_of_rows(data.train))[held]
    linear = torch.stack([outputs[cell.label][held] for cell in used])
    if not len(y):  # nobody has two rows
        weights = np.zeros((len(data.clients), len(used)))
        weights[:, -1] = 1
        return Selection(
            used,
            weights,
            [{"linear": 1.0}] * len(weights),
            [ALONE] * len(weights),
            [(0.0, np.inf)] * len(weights),
            linear[0],
            dropped,
        )
    first = stack(Candidates(linear, y, site, len(data.clients), is_class), folds[held.numpy()])
    return finished(used, data, folds, linear[0], first.held_out, first.weights.numpy(), seed, clock, out)


def finished(
    used: list[Cell],
    data: FederatedData,
    folds: NDArray[np.int64],
    own: Tensor,
    linear: Tensor,
    weights: NDArray[np.float64],
    seed: int,
    clock: Clock,
    out: Path,
) -> Selection:
    """Trees beside the linear blend, and the promise; `own` and `linear` are outputs out of fold."""
    is_class, held, sites = data.task == "classification", torch.from_numpy(folds >= 0), len(data.clients)
    y, site = data.train.y[held], torch.from_numpy(site_of_rows(data.train))[held]
    dropped: list[dict[str, Any]] = []
    trees = _trees(data, folds, held, linear, seed, out, clock, dropped) if clock.has_time() else {}
    own_label = [ALONE] * sites
    served, kinds = linear, [{"linear": 1.0} for _ in data.clients]
    if trees:
        best = _better(trees[TREES], own, y, site, is_class, sites)
        own = torch.where(best[site][:, None], trees[TREES].nan_to_num(), own)
        own_label = [TREES if b else ALONE for b in best.tolist()]
        served, kinds = _with_trees(trees, linear, y, site, folds[held.numpy()], is_class, sites)
    gained = _gains(served, own, y, site, is_class, sites)
    only_own = np.eye(len(used))[0]
    for i, (mean, sd) in enumerate(gained):
        if mean + KNOWN * sd < 0:  # the promise
            is_tree = own_label[i] == TREES
            kinds[i] = {TREES: 1.0} if is_tree else {"linear": 1.0}
            weights[i] = weights[i] if is_tree else only_own
            at = site == i
            served[at] = own[at]
    return Selection(used, weights, kinds, own_label, gained, served, dropped)


def _gains(
    served: Tensor, own: Tensor, y: Tensor, site: Tensor, is_class: bool, sites: int
) -> list[tuple[float, float]]:
    """By how much each site's loss is lower than with its own model, out of fold, shrunk over sites."""
    better, worse = (-row_losses(v, y, is_class) for v in (served, own))
    least = None
    if is_class:
        at = site.numpy()
        by_chance = np.bincount(at, chance(served.numpy(), own.numpy()), sites)
        least = (by_chance / np.maximum(np.bincount(at, minlength=sites), 1)).tolist()
    site_gains = gains(
        [better[site == i].numpy() for i in range(sites)],
        [worse[site == i].numpy() for i in range(sites)],
        is_bounded=False,
        least=least,
    )
    return [(gain.mean, gain.sd) for gain in site_gains]


def _better(trees: Tensor, own: Tensor, y: Tensor, site: Tensor, is_class: bool, sites: int) -> Tensor:
    """Sites whose own trees beat their own linear model."""
    has_trees = ~trees[:, 0].isnan()
    site_gains = _gains(torch.where(has_trees[:, None], trees.nan_to_num(), own), own, y, site, is_class, sites)
    with_trees = torch.zeros(sites, dtype=torch.bool, device="cpu")
    with_trees[site[has_trees].unique()] = True
    return with_trees & torch.tensor([mean > 0 for mean, _ in site_gains], device="cpu")


def _trees(
    data: FederatedData,
    folds: NDArray[np.int64],
    held: Tensor,
    base: Tensor,
    seed: int,
    out: Path,
    clock: Clock,
    dropped: list[dict[str, Any]],
) -> dict[str, Tensor]:
    """Trees for sites with enough rows and time, saved; what they say out of fold, NaN at the other sites."""
    is_class = data.task == "classification"
    all_rows = torch.full((len(data.train.x), data.outputs), torch.nan, dtype=torch.float64, device="cpu")
    all_rows[held] = base
    outputs = {TREES: torch.full_like(all_rows, torch.nan), ON_TOP: torch.full_like(all_rows, torch.nan)}
    for i in range(len(data.clients)):
        a, b = int(data.train.starts[i]), int(data.train.starts[i + 1])
        x, y = data.train.of(i)
        if not boosting.worth_it(y, is_class):
            continue
        try:
            for kind, start in ((TREES, None), (ON_TOP, all_rows[a:b])):
                of_site = ((x, y), folds[a:b], start, data.outputs, is_class, seed, clock.check)
                outputs[kind][a:b], trees = boosting.kept_or_grown(out / TREES_FOLDER, *of_site)
                trees.save(trees_path(out, i, kind))
        except OutOfTime:
            for values in outputs.values():
                values[a:b] = torch.nan
            label = f"trees at {data.clients[i]}"
            dropped.append({"label": label, "round": 0, "val": None, "why": "the time limit"})
    held_outputs = {kind: v[held] for kind, v in outputs.items()}
    return held_outputs if bool((~held_outputs[TREES].isnan()).any()) else {}


def trees_path(out: Path, site: int, kind: str) -> Path:
    """Sites by number: names may be anything."""
    return out / TREES_FOLDER / f"{'alone' if kind == TREES else 'on-top'}-{site}.safetensors"


def _with_trees(
    trees: dict[str, Tensor],
    linear: Tensor,
    y: Tensor,
    site: Tensor,
    folds: NDArray[np.int64],
    is_class: bool,
    sites: int,
) -> tuple[Tensor, list[dict[str, float]]]:
    """Blend the linear part with trees at the sites that have them."""
    rows = (~trees[TREES][:, 0].isnan()).nonzero()[:, 0]
    outputs = torch.stack([linear[rows], trees[TREES][rows], trees[ON_TOP][rows]])
    known = site[rows].unique()
    place = torch.full((sites,), -1, device="cpu").index_put_((known,), torch.arange(len(known), device="cpu"))
    stacked = stack(Candidates(outputs, y[rows], place[site[rows]], len(known), is_class), folds[rows.numpy()])
    served = linear.clone()
    served[rows] = stacked.held_out
    kinds = [{"linear": 1.0} for _ in range(sites)]
    for row, i in enumerate(known.tolist()):
        kinds[i] = dict(zip(("linear", TREES, ON_TOP), stacked.weights[row].tolist(), strict=True))
    return served, kinds


def delivered_outputs(selection: Selection, data: FederatedData, rows: Rows, out: Path) -> dict[str, Tensor]:
    """What the delivered models say of rows: served, alone (the best own one) and in common."""
    is_class = data.task == "classification"
    linear = {}
    for cell in selection.cells:
        models = delivered(cell, data.clients)
        linear[cell.label] = outputs_of(cell.config, data, models, rows)
    stacked = torch.stack([linear[cell.label] for cell in selection.cells])
    site = torch.from_numpy(site_of_rows(rows))
    base = (torch.from_numpy(selection.weights)[site].mT[:, :, None] * stacked).sum(0)
    base = base.log_softmax(1) if is_class else base
    served, alone = base.clone(), linear[ALONE].clone()
    for i, kinds in enumerate(selection.trees):
        a, b = int(rows.starts[i]), int(rows.starts[i + 1])
        if b == a or (set(kinds) == {"linear"} and selection.alone[i] == ALONE):
            continue
        x, parts = rows.x[a:b], {"linear": base[a:b]}
        for kind in (TREES, ON_TOP):
            start = base[a:b] if kind == ON_TOP else None
            ensemble = Trees.read(
                trees_path(out, i, kind), data.shape[0] + (data.outputs if start is not None else 0), data.outputs
            )
            parts[kind] = tree_outputs(ensemble, x, start, is_class)
        mixed = sum(weight * parts[kind] for kind, weight in kinds.items())
        served[a:b] = mixed.log_softmax(1) if is_class else mixed  # type: ignore[union-attr]
        if selection.alone[i] == TREES:
            alone[a:b] = parts[TREES]
    return {"personal": served, "alone": alone, "common": linear.get(COMMON, linear[ALONE])}


def site_figures(outputs: Tensor, rows: Rows, is_class: bool) -> list[dict[str, float]]:
    """Per site the task's metrics on its rows; NaN where it has none."""
    out = []
    for a, b in pairwise(rows.starts.tolist()):
        if a == b:
            out.append(dict.fromkeys(("accuracy", "loss") if is_class else ("rmse", "mse"), float("nan")))
            continue
        y, site_outputs = rows.y[a:b], outputs[a:b]
        loss = float(row_losses(site_outputs, y, is_class).mean())
        if is_class:
            out.append({"accuracy": float((site_outputs.argmax(1) == y).double().mean()), "loss": loss})
        else:
            out.append({"rmse": loss**0.5, "mse": loss})
    return out


def fit_tables(
    cells: list[Cell],
    loaded: FederatedData,
    out: Path,
    seed: int,
    root: Path | None,
    listener: CellListener,
    limit: float,
) -> tuple[Selection, FederatedData]:
    """Train, cross-fit and choose."""
    data, clock = all_in_training(loaded).to(torch.float64), Clock(limit)
    folds = folds_of(data, seed)
    outputs, dropped = cross_fitted(cells, data, folds, root, listener, clock)
    selection = select(cells, data, folds, outputs, seed, clock, out)
    selection.dropped.extend(dropped)
    return selection, data
