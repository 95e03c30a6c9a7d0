"""Profile intervals of standard deviations and correlations of random effects, from the sums that a fit asks for.

As lme4's confint: the profile of the deviance of maximum likelihood over all other parameters. An effect is put first
in its block, so that its standard deviation is one entry of the relative factor; of two effects, so is the correlation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import chi2  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.numerics.bounded_newton import Floats, Minimum, Point, minimise
from fedtailor.numerics.cross_products import factor_of, lower_entries
from fedtailor.numerics.profile_likelihood import endpoint, transformed

ONE = 1 - 1e-9  # a correlation


class Target(NamedTuple):
    """A standard deviation (one place) or a correlation (two) of effects of all blocks; none: the residual one."""

    places: tuple[int, ...]


def targets(blocks: tuple[int, ...], has_sigma: bool) -> list[Target]:
    """By block the standard deviations, then the correlations; the residual standard deviation last."""
    found, start = [], 0
    for size in blocks:
        found += [Target((start + i,)) for i in range(size)]
        found += [Target((start + j, start + i)) for i in range(size) for j in range(i)]
        start += size
    return [*found, *([Target(())] if has_sigma else [])]


def order_of(target: Target, blocks: tuple[int, ...]) -> list[int]:
    """All effects, those of the target first in their block."""
    order, start = [], 0
    for size in blocks:
        places = range(start, start + size)
        order += [p for p in target.places if p in places] + [p for p in places if p not in target.places]
        start += size
    return order


def reorder(theta: Tensor, order: list[int], blocks: tuple[int, ...]) -> Tensor:
    """Entries of the triangular factor of the same covariance with its effects in another order."""
    factor = factor_of(theta, blocks)
    square = (factor @ factor.mT)[order][:, order]
    out = torch.zeros_like(square)
    for j in range(len(square)):  # a semidefinite matrix has a factor, too
        rest = square[j:, j] - out[j:, :j] @ out[j, :j]
        if rest[0] > 1e-14 * square[j, j].clamp(min=1e-300):
            out[j:, j] = rest / rest[0].sqrt()
    rows, columns = zip(*lower_entries(blocks), strict=True)
    return out[list(rows), list(columns)]


def intervals(
    evaluate: Callable[[list[int]], Callable[[Floats], Point]],
    blocks: tuple[int, ...],
    theta: Floats,
    others: Floats,
    has_sigma: bool,
    level: float,
) -> Iterator[tuple[float, float]]:
    """Of all targets. `evaluate(order)` gives the deviance by [theta in that order, others]; a residual standard
    deviation is the last of the others."""
    entries = lower_entries(blocks)
    rise = float(chi2.ppf(level, 1))
    for target in targets(blocks, has_sigma):
        order = order_of(target, blocks)
        own = reorder(torch.from_numpy(theta), order, blocks).numpy()
        corner = -1 if not target.places else entries.index((order.index(target.places[0]),) * 2)
        free = np.concatenate([own, others])
        change, start, lower, low, high = _coordinates(target, entries, order, corner, free, has_sigma)
        by = transformed(evaluate(order), change)
        found: Minimum = minimise(by, start, lower, longest=1.0)
        ends = [endpoint(by, found, lower, d, limit, rise) for d, limit in ((-1, low), (1, high))]
        yield ends[0], ends[1]


def _coordinates(
    target: Target, entries: list[tuple[int, int]], order: list[int], corner: int, free: Floats, has_sigma: bool
) -> tuple[Callable[[Tensor], Tensor], Floats, Floats, float, float]:
    """From coordinates whose first is the target to [theta, others]; where they start, bounds, and the target's."""
    bounds = np.array([0.0 if i == j else -np.inf for i, j in entries] + [-np.inf] * (len(free) - len(entries)))
    if has_sigma:
        bounds[-1] = 1e-8
    places = np.arange(len(free))
    if not target.places:
        first = np.array([len(free) - 1, *places[:-1]])
        return _permute(first), free[first], bounds[first], 1e-6, np.inf
    if len(target.places) == 1:
        first = np.array([corner, *np.delete(places, corner)])
        start, lower = free[first].copy(), bounds[first]
        if has_sigma:
            start[0] = start[0] * start[-1]
        back = _permute(first)

        def to_free(psi: Tensor) -> Tensor:
            divided = torch.cat([psi[:1] / psi[-1:], psi[1:]]) if has_sigma else psi
            return back(divided)

        return to_free, start, lower, 0.0, np.inf
    row, column = order.index(target.places[1]), order.index(target.places[0])
    across, down = entries.index((row, column)), entries.index((row, row))
    length = float(np.hypot(free[across], free[down]))
    first = np.array([across, down, *np.delete(places, [across, down])])
    start, lower = free[first].copy(), bounds[first].copy()
    start[0] = np.clip(free[across] / length if length > 0 else 0.0, -0.999, 0.999)
    start[1], lower[0], lower[1] = length, -ONE, 0.0
    back = _permute(first)

    def of_correlation(psi: Tensor) -> Tensor:
        pair = torch.stack([psi[1] * psi[0], psi[1] * (1 - psi[0].square()).clamp(min=1e-30).sqrt()])
        return back(torch.cat([pair, psi[2:]]))

    return of_correlation, start, lower, -ONE, ONE


def _permute(first: np.ndarray) -> Callable[[Tensor], Tensor]:
    back = torch.from_numpy(np.argsort(first))
    return lambda psi: psi[back]
