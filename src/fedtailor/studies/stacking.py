"""How much of each candidate serves a site: weights on the simplex, shrunk towards those that serve the federation.

All from out-of-fold outputs. A site's weights minimise its loss plus that of `pull` typical rows of the federation, for
which the common weights are best; the pull is chosen by predicting folds from the others. Of one candidate for all, one
blend for all and blends by site, from strong to weak pulls, the first is taken that is not surely worse than the best:
weights of folds that share training rows flatter the richer choice. For the same reason the weakest pull is not weak:
with 30 rows, folds promised gains on other tables than those of the benchmark, and new rows showed losses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.numerics.blending import HELP, NEWTON, OWN_PULLS, ROUNDING, SURELY, on_simplex, row_losses

ALL = float("inf")  # the pull of one blend for all sites
PULLS = (ALL, *OWN_PULLS)


@dataclass(frozen=True)
class Candidates:
    """Out-of-fold outputs of the candidates [candidates, rows, outputs], and what was to be said."""

    outputs: Tensor
    y: Tensor
    site: Tensor  # of each row
    sites: int
    is_class: bool

    @property
    def is_count(self) -> bool:
        """Targets that are whole numbers and no classes: outputs are logarithms of rates."""
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
    """One set of weights for all sites [1, candidates]."""
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
    """Weights for every site, and what they would have said of rows that had no say in them."""

    weights: Tensor  # [sites, candidates]
    common: Tensor  # [candidates]
    pull: float
    held_out: Tensor  # [rows, outputs]


def stack(c: Candidates, folds: NDArray[np.int64]) -> Stacked:
    """Settle the pull by folds, then the weights from all rows; sites with more noise count less."""
    if not (c.is_class or c.is_count):
        noise = _noise(c)[c.site][:, None]
        stacked = _stack(replace(c, outputs=c.outputs / noise, y=c.y / noise), folds)
        return replace(stacked, held_out=stacked.held_out * noise)
    return _stack(c, folds)


def _noise(c: Candidates) -> Tensor:
    """Root of the mean squared error of the best candidate at each site; few rows are helped by those of all."""
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
    chosen_pull = next(pull for pull, loss in losses.items() if not _surely_above(loss - best, c.site, c.sites, least))
    if chosen_pull is None:
        common = best_single(c)
        return Stacked(common.expand(c.sites, -1).clone(), common[0], ALL, blends[chosen_pull])
    common = common_weights(c)
    return Stacked(site_weights(c, common, chosen_pull), common[0], chosen_pull, blends[chosen_pull])


def _surely_above(lost: Tensor, site: Tensor, sites: int, least: float) -> bool:
    """Whether a sum is above `least` by more than chance, be it that of rows or that of sites."""
    by_site = torch.zeros(sites, dtype=lost.dtype, device="cpu").index_add_(0, site, lost)
    spread = max(float((v - v.mean()).square().sum().sqrt()) for v in (lost, by_site))
    return float(lost.sum()) > SURELY * spread + least
