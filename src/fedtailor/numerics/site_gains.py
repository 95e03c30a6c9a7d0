"""By how much each site gains, and how sure that is, shrunk over sites; all that sites need of each other are sums.

Gains of sites are draws from a normal distribution, whose mean and spread are estimated by the moments of DerSimonian
and Laird. Variances of rows are those of the site and of all; a site out of all proportion is left out of these.
The median that says what is in proportion comes from numbers of sites below some thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

ENOUGH = 4  # degrees of freedom from which on a site's own variance is looked at
OUT_OF_PROPORTION = 10.0  # times the usual variance
USUAL = 8.0  # degrees that the variance of all sites is worth beside a site's own
LEAST = 1e-4  # of the usual variance of a mean: no site counts more than ten thousand others
THRESHOLDS, LOOKS = 64, 8  # the median is known to 138 / 64**8 of itself
SMALLEST, LARGEST = -69.0, 69.0  # logarithms of a variance
SUMS = 9


class Gains(NamedTuple):
    """Rows of a site, the mean of their gains, the squares around it, and the least variance of a row."""

    rows: Tensor
    mean: Tensor
    squares: Tensor
    least: Tensor

    @property
    def freedom(self) -> Tensor:
        return (self.rows - 1).clamp(min=0)

    @property
    def variance(self) -> Tensor:
        return self.squares / self.freedom.clamp(min=1)


class Shared(NamedTuple):
    """What all sites know of each other's gains."""

    limit: Tensor  # of a variance that is in proportion; 0: all are
    variance: Tensor
    unit: Tensor  # variance of the mean of a usual site
    spread: Tensor
    center: Tensor
    doubt: Tensor  # variance of the center


def gains_of(gain: Tensor, rows: Tensor, least: Tensor) -> Gains:
    """From the gain of every row and its least variance; `rows` are 1 where it counts."""
    count = rows.sum()
    mean = (gain * rows).sum() / count.clamp(min=1)
    return Gains(count, mean, ((gain - mean).square() * rows).sum(), (least * rows).sum() / count.clamp(min=1))


def chance(first: Tensor, second: Tensor) -> Tensor:
    """For each row the variance of the difference of two log-likelihoods, by log-probabilities [rows, classes], under
    the probabilities between the two for which neither is better.
    """
    apart = second - first
    low = torch.zeros_like(apart[:, :1])
    high, p = low + 1, apart.exp() * 0
    for _ in range(40):
        middle = (low + high) / 2
        p = (first + middle * apart).softmax(1)
        is_above = (p * apart).sum(1, keepdim=True) > 0
        low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
    return (p * apart.square()).sum(1) - (p * apart).sum(1).square()


def below(own: Gains, thresholds: Tensor) -> Tensor:
    """Whether the site's own variance is known, and for each threshold whether it is not above it."""
    is_known = own.freedom >= ENOUGH
    is_below = own.variance <= thresholds
    return torch.cat([is_known[None], is_known & is_below]).to(thresholds.dtype)


def _noise(own: Gains, shared: Shared) -> tuple[Tensor, Tensor]:
    """Variance of the site's mean, and whether its own variance is out of proportion."""
    is_apart = (own.freedom >= ENOUGH) & (own.variance > shared.limit) & (shared.limit > 0)
    together = (USUAL * shared.variance + own.squares) / (USUAL + own.freedom)
    of_rows = torch.maximum(torch.where(is_apart, own.variance, together), own.least)
    return torch.maximum(of_rows / own.rows.clamp(min=1), LEAST * shared.unit), is_apart


def sums_of(own: Gains, shared: Shared) -> Tensor:
    """All that a site adds; which of it counts depends on what is known already."""
    noise, is_apart = _noise(own, shared)
    size, weight = (shared.unit / v.clamp(min=1e-300) for v in (noise, noise + shared.spread))
    of_rows = [torch.where(is_apart, 0, own.freedom), torch.where(is_apart, 0, own.squares)]
    of_means = [size, size * own.mean, size * own.mean.square(), size.square(), weight, weight * own.mean]
    is_here = (own.rows > 0).to(noise.dtype)
    return torch.stack([is_here, *of_rows, *(is_here * v for v in of_means)])


def median_by_counts(ask: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The median of the sites' own variances, from how many are not above each of some thresholds; 0 if none is known.

    Of an even number it is the mean of the two in the middle, as usual.
    """
    ends = [(like * 0 + SMALLEST, like * 0 + LARGEST) for _ in range(2)]
    part = torch.linspace(0, 1, THRESHOLDS + 2, dtype=like.dtype, device=like.device)[1:-1]
    for _ in range(LOOKS):
        logs = torch.cat([low + part * (high - low) for low, high in ends])
        total = ask(logs.exp())
        known, counts = total[0], total[1:]
        if not known > 0:
            return torch.zeros_like(like)
        ranks = (((known + 1) / 2).floor(), ((known + 2) / 2).floor())
        for i, rank in enumerate(ranks):
            own = logs[i * THRESHOLDS : (i + 1) * THRESHOLDS]
            at = int((counts[i * THRESHOLDS : (i + 1) * THRESHOLDS] < rank).sum())
            low, high = ends[i]
            ends[i] = (own[at - 1] if at else low, own[at] if at < THRESHOLDS else high)
    values = [torch.where(high > SMALLEST + 1e-6, high.exp(), 0) for _, high in ends]
    return (values[0] + values[1]) / 2


def shared_by(count_below: Callable[[Tensor], Tensor], ask: Callable[[Shared], Tensor], rows: Tensor) -> Shared:
    """Limit, variance, spread and center in turn, each from sums that use those before; `rows` are those of all."""
    zero = torch.zeros_like(rows)
    known = Shared(OUT_OF_PROPORTION * median_by_counts(count_below, zero), zero, zero, zero, zero, zero)
    sites, freedom, squares = ask(known)[:3]
    variance = squares / freedom.clamp(min=1)
    known = known._replace(variance=variance, unit=variance * sites / rows.clamp(min=1))
    if not known.unit > 0:
        return known  # what serves sites is what they have
    size, first, second, twice = ask(known)[3:7]
    excess = second - first.square() / size - (sites - 1) * known.unit
    scale = size - twice / size
    known = known._replace(spread=torch.where(scale > 1e-12 * size, excess / scale, 0).clamp(min=0))
    weight, weighted = ask(known)[7:]
    return known._replace(center=weighted / weight, doubt=known.unit / weight)


def shrunk(own: Gains, shared: Shared) -> tuple[Tensor, Tensor]:
    """Mean and standard error of a site's gain."""
    noise, _ = _noise(own, shared)
    is_here = own.rows > 0
    trust = torch.where(is_here, shared.spread / (shared.spread + noise).clamp(min=1e-300), 0)
    mean = shared.center + trust * (own.mean - shared.center)
    error = torch.where(is_here, trust * noise + (1 - trust).square() * shared.doubt, shared.spread + shared.doubt)
    return mean, error.sqrt()
