"""A blend of linear models and boosted trees for each site: weights on the simplex, shrunk towards common ones.

All from out-of-fold outputs. A site's weights minimise its loss plus that of `pull` typical rows of the federation, for
which the common weights are best; the pull is chosen by predicting folds from the others. Of one candidate for all, one
blend for all and blends by site, from strong to weak pulls, the first is taken that is not surely worse than the best:
weights of folds that share training rows flatter the richer choice. For the same reason the weakest pull is not weak:
with 30 rows, folds promised gains on other tables than those of the benchmark, and new rows showed losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.numerics.blending import HELP, KNOWN, NEWTON, OWN_PULLS, ROUNDING, SURELY, on_simplex, row_losses
from fedtailor.studies.grid import Cell, CellListener
from fedtailor.tables import boosted_trees
from fedtailor.tables.boosted_trees import ON_TOP, TREES, TREES_FOLDER, Trees, tree_outputs
from fedtailor.tables.candidates import ALONE, COMMON, Clock, OutOfTime, delivered_models, site_of_rows
from fedtailor.tables.model_selection import chance, gains
from fedtailor.tables.shared_trees import SharedTrees

LEAST = 0.01  # weights below this are left out


@dataclass(frozen=True)
class Selection:
    """The models chosen for each site, with their weights and out-of-fold outputs."""

    cells: list[Cell]
    weights: NDArray[np.float64]  # [sites, cells], of the linear part
    trees: list[dict[str, float]]  # per site by kind, and "linear"
    alone: list[str]  # per site the best model of its own
    gains: list[tuple[float, float]]  # over that, out of fold: mean and standard error
    out_of_fold: Tensor  # of the served models
    dropped: list[dict[str, Any]]
    shared: NDArray[np.float64] | None = None  # per site the weight of the trees of all sites, on the linear part


def select(
    cells: list[Cell],
    data: FederatedData,
    folds: NDArray[np.int64],
    outputs: dict[str, Tensor],
    seed: int,
    clock: Clock,
    out: Path,
    shared: Boosted | None = None,
    progress: CellListener = lambda cell, done, of: None,
) -> Selection:
    """Choose weights and trees; a site whose own model is significantly better keeps that."""
    is_class = data.task == "classification"
    used = [cell for cell in cells if cell.label in outputs]
    held = torch.from_numpy(folds >= 0)
    y, site = data.train.y[held], torch.from_numpy(site_of_rows(data.train))[held]
    linear = torch.stack([outputs[cell.label][held] for cell in used])
    if not len(y):  # no site has two rows
        weights = np.zeros((len(data.clients), len(used)))
        weights[:, -1] = 1
        return Selection(
            used,
            weights,
            [{"linear": 1.0}] * len(weights),
            [ALONE] * len(weights),
            [(0.0, np.inf)] * len(weights),
            linear[0],
            [],
        )
    at, boosted = _boosted(used, data, outputs, shared)
    tried = linear if boosted is None else torch.cat([linear, boosted[held][None]])
    first = stack(Candidates(tried, y, site, len(data.clients), is_class), folds[held.numpy()])
    weights = first.weights.numpy()
    of_shared = None
    if boosted is not None:
        of_shared, weights = weights[:, -1].copy(), weights[:, :-1].copy()
        weights[:, at] += of_shared
    return blend_trees(
        used, data, folds, linear[0], first.held_out, weights, seed, clock, out, shared=of_shared, progress=progress
    )


def _boosted(
    used: list[Cell], data: FederatedData, outputs: dict[str, Tensor], shared: Boosted | None
) -> tuple[int, Tensor | None]:
    """Which candidate the trees of all sites are on, and the outputs of both together out of fold."""
    if shared is None:
        return 0, None
    at = [cell.label for cell in used].index(shared.label)
    both = outputs[shared.label] + shared.trees.out_of_fold
    return at, both.log_softmax(1) if data.task == "classification" else both


@dataclass(frozen=True)
class Boosted:
    """The trees of all sites, and the label of the candidate on whose residuals they were grown."""

    label: str
    trees: SharedTrees


def blend_trees(
    used: list[Cell],
    data: FederatedData,
    folds: NDArray[np.int64],
    own: Tensor,
    linear: Tensor,
    weights: NDArray[np.float64],
    seed: int,
    clock: Clock,
    out: Path,
    *,
    shared: NDArray[np.float64] | None = None,
    progress: CellListener = lambda cell, done, of: None,
) -> Selection:
    """Add trees to the linear blend; a site whose own model is significantly better keeps that.

    own, linear: out-of-fold outputs of the site's own models and of the linear blend.
    """
    is_class, held, sites = data.task == "classification", torch.from_numpy(folds >= 0), len(data.clients)
    y, site = data.train.y[held], torch.from_numpy(site_of_rows(data.train))[held]
    dropped: list[dict[str, Any]] = []
    trees = _fit_site_trees(data, folds, held, linear, seed, out, clock, dropped, progress) if clock.has_time() else {}
    own_label = [ALONE] * sites
    served, kinds = linear, [{"linear": 1.0} for _ in data.clients]
    if trees:
        best = _sites_with_better_trees(trees[TREES], own, y, site, is_class, sites)
        own = torch.where(best[site][:, None], trees[TREES].nan_to_num(), own)
        own_label = [TREES if b else ALONE for b in best.tolist()]
        served, kinds = _blend_at_sites(trees, linear, y, site, folds[held.numpy()], is_class, sites)
    gained = _estimate_gains(served, own, y, site, is_class, sites)
    only_own = np.eye(len(used))[0]
    for i, (mean, sd) in enumerate(gained):
        if mean + KNOWN * sd < 0:  # its own model is significantly better
            is_tree = own_label[i] == TREES
            kinds[i] = {TREES: 1.0} if is_tree else {"linear": 1.0}
            weights[i] = weights[i] if is_tree else only_own
            if shared is not None and not is_tree:
                shared[i] = 0.0
            at = site == i
            served[at] = own[at]
    return Selection(used, weights, kinds, own_label, gained, served, dropped, shared)


def _estimate_gains(
    served: Tensor, own: Tensor, y: Tensor, site: Tensor, is_class: bool, sites: int
) -> list[tuple[float, float]]:
    """Each site's gain over its own model, out of fold, by empirical Bayes: means and standard errors."""
    better, worse = (-row_losses(v, y, is_class) for v in (served, own))
    least = None
    if is_class:
        at = site.numpy()
        by_chance = np.bincount(at, chance(served.numpy(), own.numpy()), sites)
        least = (by_chance / np.maximum(np.bincount(at, minlength=sites), 1)).tolist()
    ends = np.cumsum(np.bincount(site.numpy(), minlength=sites))[:-1]  # rows are in the order of their sites
    site_gains = gains(
        np.split(better.numpy(), ends),
        np.split(worse.numpy(), ends),
        is_bounded=False,
        least=least,
    )
    return [(gain.mean, gain.sd) for gain in site_gains]


def _sites_with_better_trees(trees: Tensor, own: Tensor, y: Tensor, site: Tensor, is_class: bool, sites: int) -> Tensor:
    """Sites whose own trees are better than their own linear model."""
    has_trees = ~trees[:, 0].isnan()
    site_gains = _estimate_gains(
        torch.where(has_trees[:, None], trees.nan_to_num(), own), own, y, site, is_class, sites
    )
    with_trees = torch.zeros(sites, dtype=torch.bool, device="cpu")
    with_trees[site[has_trees].unique()] = True
    return with_trees & torch.tensor([mean > 0 for mean, _ in site_gains], device="cpu")


def _fit_site_trees(
    data: FederatedData,
    folds: NDArray[np.int64],
    held: Tensor,
    base: Tensor,
    seed: int,
    out: Path,
    clock: Clock,
    dropped: list[dict[str, Any]],
    progress: CellListener,
) -> dict[str, Tensor]:
    """Fit and save trees for sites with enough rows, within the time limit; out-of-fold outputs, NaN at other sites."""
    is_class = data.task == "classification"
    all_rows = torch.full((len(data.train.x), data.outputs), torch.nan, dtype=torch.float64, device="cpu")
    all_rows[held] = base
    outputs = {TREES: torch.full_like(all_rows, torch.nan), ON_TOP: torch.full_like(all_rows, torch.nan)}
    large = [i for i in range(len(data.clients)) if boosted_trees.has_enough_rows(data.train.targets(i), is_class)]
    for i in large:
        a, b = int(data.train.starts[i]), int(data.train.starts[i + 1])
        x, y = data.train.of(i)
        try:
            for kind, start in ((TREES, None), (ON_TOP, all_rows[a:b])):
                of_site = ((x, y), folds[a:b], start, data.outputs, is_class, seed, clock.check)
                outputs[kind][a:b], trees = boosted_trees.load_or_fit_trees(out / TREES_FOLDER, *of_site)
                trees.save(trees_path(out, i, kind))
            progress("trees of single sites", large.index(i) + 1, len(large))
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


def _blend_at_sites(
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


def shared_trees_path(out: Path) -> Path:
    return out / TREES_FOLDER / "of-all-sites.safetensors"


def read_shared_trees(out: Path, data: FederatedData) -> Trees:
    """The trees of all sites."""
    return Trees.read(shared_trees_path(out), data.shape[0], data.outputs)


def delivered_outputs(selection: Selection, data: FederatedData, rows: Rows, out: Path) -> dict[str, Tensor]:
    """Outputs of the delivered models for rows: personal, alone (the best own one) and, if there is one, common."""
    is_class = data.task == "classification"
    linear = {}
    for cell in selection.cells:
        linear[cell.label] = delivered_models(cell, data.clients).outputs(rows, is_class)
    stacked = torch.stack([linear[cell.label] for cell in selection.cells])
    site = torch.from_numpy(site_of_rows(rows))
    base = (torch.from_numpy(selection.weights)[site].mT[:, :, None] * stacked).sum(0)
    if selection.shared is not None and selection.shared.any():
        of_all = read_shared_trees(out, data)
        base = base + torch.from_numpy(selection.shared)[site][:, None] * of_all(rows.x)
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
    common = linear.get(COMMON, linear[ALONE] if len(data.clients) == 1 else None)
    return {"personal": served, "alone": alone} | ({} if common is None else {"common": common})


ALL = float("inf")  # the pull of one blend for all sites
PULLS = (ALL, *OWN_PULLS)


@dataclass(frozen=True)
class Candidates:
    """Out-of-fold outputs of the candidates [candidates, rows, outputs], and the targets."""

    outputs: Tensor
    y: Tensor
    site: Tensor  # of each row
    sites: int
    is_class: bool

    @property
    def is_count(self) -> bool:
        """Whether targets are counts: outputs are logarithms of rates."""
        return not (self.is_class or self.y.is_floating_point())

    def only(self, rows: Tensor) -> Candidates:
        return Candidates(self.outputs[:, rows], self.y[rows], self.site[rows], self.sites, self.is_class)

    def blend(self, weights: Tensor) -> Tensor:
        """Outputs with the weights [sites, candidates] of each row's site; logits are normalised again."""
        mixed = (weights[self.site].mT[:, :, None] * self.outputs).sum(0)
        return mixed.log_softmax(1) if self.is_class else mixed

    def losses(self, blended: Tensor) -> Tensor:
        """Log loss, squared error or half the deviance of every row."""
        return row_losses(blended, self.y, self.is_class)

    def quadratic(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient [sites, m] and Hessian [sites, m, m] of the sum of losses at each site, by its weights."""
        blended, outputs = self.blend(weights), self.outputs.permute(1, 0, 2)  # [rows, m, outputs]
        if self.is_class:
            p = blended.exp()
            rest = p - torch.nn.functional.one_hot(self.y, blended.shape[1])
            centered = outputs - (p[:, None] * outputs).sum(2, keepdim=True)
            curved = (p[:, None] * centered) @ centered.mT
        elif self.is_count:
            rates = blended.exp()
            rest, curved = rates - self.y, (rates[:, None] * outputs) @ outputs.mT
        else:
            rest, curved = 2 * (blended - self.y), 2 * outputs @ outputs.mT
        by_row = (outputs * rest[:, None]).sum(2)
        return (
            torch.zeros_like(weights).index_add_(0, self.site, by_row),
            weights.new_zeros((*weights.shape, weights.shape[1])).index_add_(0, self.site, curved),
        )


def common_weights(c: Candidates) -> Tensor:
    """Weights that are common to all sites [1, candidates]."""
    everybody = Candidates(c.outputs, c.y, torch.zeros_like(c.site), 1, c.is_class)
    uniform = torch.full((1, len(c.outputs)), 1 / len(c.outputs), dtype=torch.float64, device="cpu")
    return _minimum(everybody, uniform, pull=1.0)


def site_weights(c: Candidates, common: Tensor, pull: float) -> Tensor:
    """Weights of every site [sites, candidates]."""
    start = common.expand(c.sites, -1).clone()
    return start if pull == ALL else _minimum(c, start, pull)


def best_single(c: Candidates) -> Tensor:
    """The weight 1 on the candidate with the least loss over all sites [1, candidates]."""
    totals = torch.stack([c.losses(outputs).sum() for outputs in c.outputs])
    return torch.nn.functional.one_hot(totals.argmin(), len(totals)).to(torch.float64)[None]


def _minimum(c: Candidates, prior: Tensor, pull: float) -> Tensor:
    """Weights with the least loss and distance from `prior`, measured in the mean curvature of a row times `pull`."""
    weights = prior
    for _ in range(NEWTON if c.is_class or c.is_count else 1):
        gradient, hessian = c.quadratic(weights)
        metric = pull * hessian.sum(0) / max(len(c.y), 1)
        inner, linear = hessian + metric, (hessian @ weights[:, :, None])[:, :, 0] - gradient + prior @ metric
        weights = on_simplex(inner, linear)
    return weights


@dataclass(frozen=True)
class Stacked:
    """Weights for every site, and the blended outputs for rows that were held out of the weights."""

    weights: Tensor  # [sites, candidates]
    common: Tensor  # [candidates]
    pull: float
    held_out: Tensor  # [rows, outputs]


def stack(c: Candidates, folds: NDArray[np.int64]) -> Stacked:
    """Choose the pull by folds, then estimate the weights from all rows; noisier sites count less."""
    if not (c.is_class or c.is_count):
        noise = _noise(c)[c.site][:, None]
        stacked = _stack(replace(c, outputs=c.outputs / noise, y=c.y / noise), folds)
        return replace(stacked, held_out=stacked.held_out * noise)
    return _stack(c, folds)


def _noise(c: Candidates) -> Tensor:
    """Root mean squared error of the best candidate at each site, shrunk towards that of all sites."""
    squares = torch.stack([row_losses(outputs, c.y, c.is_class) for outputs in c.outputs])
    count = torch.zeros(c.sites, dtype=torch.float64, device="cpu").index_add_(0, c.site, torch.ones_like(squares[0]))
    total = torch.zeros((len(squares), c.sites), dtype=torch.float64, device="cpu").index_add_(1, c.site, squares)
    usual = squares.mean(1).min()
    return ((total.min(0).values + HELP * usual) / (count + HELP)).sqrt().clamp(min=1e-150)


def _stack(c: Candidates, folds: NDArray[np.int64]) -> Stacked:
    at = torch.from_numpy(folds)
    blends = {pull: torch.zeros_like(c.outputs[0]) for pull in (None, *PULLS)}  # None: one candidate
    for fold in np.unique(folds):
        held, rest = at == int(fold), c.only((at != int(fold)).nonzero()[:, 0])
        single, common = best_single(rest), common_weights(rest)
        own = c.only(held.nonzero()[:, 0])
        for pull in blends:
            weights = single.expand(c.sites, -1) if pull is None else site_weights(rest, common, pull)
            blends[pull][held] = own.blend(weights)
    losses = {pull: c.losses(blended) for pull, blended in blends.items()}
    best = min(losses.values(), key=lambda loss: float(loss.sum()))
    least = ROUNDING * abs(float(best.sum()))
    chosen_pull = next(
        pull for pull, loss in losses.items() if not _is_surely_above(loss - best, c.site, c.sites, least)
    )
    if chosen_pull is None:
        common = best_single(c)
        return Stacked(common.expand(c.sites, -1).clone(), common[0], ALL, blends[chosen_pull])
    common = common_weights(c)
    return Stacked(site_weights(c, common, chosen_pull), common[0], chosen_pull, blends[chosen_pull])


def _is_surely_above(lost: Tensor, site: Tensor, sites: int, least: float) -> bool:
    """Whether a sum exceeds `least` by more than chance, over rows and over sites."""
    by_site = torch.zeros(sites, dtype=lost.dtype, device="cpu").index_add_(0, site, lost)
    spread = max(float((v - v.mean()).square().sum().sqrt()) for v in (lost, by_site))
    return float(lost.sum()) > SURELY * spread + least
