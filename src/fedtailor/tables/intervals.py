"""Prediction intervals: conformal, from out-of-fold errors of each site and, where it has few, of all sites.

Only absolute errors are used. The width at a site is a quantile of its own errors mixed with the errors of all sites,
scaled to the typical size at this site. Cross-validation over folds chooses the weight of the other sites' errors,
and a factor that gives held-out rows the nominal coverage: one for small and one for large sites.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ErrorScale = Literal["plain", "log", "root"]  # on which an interval reaches equally far to both sides


def interval_around(middle: Floats, half: float, scale: ErrorScale) -> tuple[Floats, Floats]:
    """The ends of intervals that are symmetric on the scale of numbers, logarithms or (for counts) square roots."""
    if scale == "log":
        return middle * math.exp(-half), middle * math.exp(half)
    if scale == "root":
        root = np.sqrt(middle)
        return np.maximum(root - half, 0.0) ** 2, (root + half) ** 2
    return middle - half, middle + half


def interval_errors(middle: Floats, y: Floats, scale: ErrorScale) -> Floats:
    if scale == "plain":
        return np.abs(y - middle)
    return np.abs(np.log(y) - np.log(middle)) if scale == "log" else np.abs(np.sqrt(y) - np.sqrt(middle))


LEVELS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99)
USUAL = LEVELS.index(0.9)
PULLS = (10.0, 30.0, 100.0, math.inf)  # rows that the errors of all sites are worth
HELP = 3.0  # typical rows beside a site's own, where the size of its errors is estimated
GRID = 1000  # quantiles that stand for the errors of all sites
TOGETHER = 2**21  # errors that are sorted together
SMALL = 30  # rows of a small site
ENOUGH = 50  # held-out rows of small or of large sites that give these a factor of their own
FEWEST = 10  # rows in all, below which there are no intervals


def half_widths(errors: Floats, site: NDArray[np.int64], folds: NDArray[np.int64], sites: int) -> Floats | None:
    """[sites + 1, levels]; the last row is for new sites. `errors` are absolute, out of fold."""
    if len(errors) < FEWEST or not (errors > 0).any():
        return None
    held = {pull: np.full((len(errors), len(LEVELS)), np.nan) for pull in PULLS}
    for fold in np.unique(folds):
        at = folds == fold
        if at.all():
            continue
        for pull, rows in held.items():
            rows[at] = _widths(errors[~at], site[~at], sites, pull)[site[at]]
    known = ~np.isnan(held[PULLS[0]][:, 0])
    if not known.any():
        return _widths(errors, site, sites, math.inf)
    best = min(PULLS, key=lambda pull: (_interval_score(errors[known], held[pull][known, USUAL]), -pull))
    ratios = errors[known, None] / held[best][known]
    factors = np.tile(_factors(ratios), (sites + 1, 1))
    is_small = np.bincount(site, minlength=sites) < SMALL
    for group in (is_small, ~is_small):  # otherwise large sites would decide for small ones
        rows = group[site[known]]
        if rows.sum() >= ENOUGH:
            factors[:sites][group] = _factors(ratios[rows])
    return np.maximum.accumulate(_widths(errors, site, sites, best) * factors, axis=1)


def _widths(errors: Floats, site: NDArray[np.int64], sites: int, pull: float) -> Floats:
    count = np.bincount(site, minlength=sites)
    usual = float(errors.mean())
    size = (np.bincount(site, errors, sites) + HELP * usual) / (count + HELP)
    common = np.quantile(errors / size[site], (np.arange(GRID) + 0.5) / GRID)
    out = np.empty((sites + 1, len(LEVELS)))
    out[sites] = np.quantile(errors, LEVELS)
    out[:sites] = size[:, None] * np.quantile(common, LEVELS)
    ordered, first = errors[np.argsort(site, kind="stable")], np.cumsum(count) - count
    for rows in np.unique(count[count > 0]) if math.isfinite(pull) else ():  # sites of as many rows together
        weights = np.concatenate([np.ones(rows), np.full(GRID, pull / GRID)])
        alike = np.flatnonzero(count == rows)
        for some in np.array_split(alike, -(-len(alike) * len(weights) // TOGETHER)):
            own = ordered[first[some, None] + np.arange(rows)]
            values = np.concatenate([own, size[some, None] * common], axis=1)
            by_size = np.argsort(values, axis=1, kind="stable")
            share = np.cumsum(weights[by_size], axis=1) / weights.sum()
            at = np.stack([(share < level).sum(1) for level in LEVELS], axis=1).clip(max=len(weights) - 1)
            out[some] = np.take_along_axis(np.take_along_axis(values, by_size, 1), at, 1)
    return np.maximum(out, 1e-12 * usual)


def _factors(ratios: Floats) -> Floats:
    """The factors of widths, by level, that give held-out rows the nominal coverage."""
    rows = len(ratios)
    ranks = np.minimum(np.ceil((rows + 1) * np.array(LEVELS)), rows).astype(int) - 1
    ordered = np.sort(ratios, axis=0)
    return np.array([ordered[rank, level] for level, rank in enumerate(ranks)])


def _interval_score(errors: Floats, widths: Floats) -> float:
    """Interval score: mean width plus a penalty for rows outside (Gneiting and Raftery); lower is better."""
    return float((2 * widths + 2 / (1 - LEVELS[USUAL]) * np.maximum(errors - widths, 0)).mean())
