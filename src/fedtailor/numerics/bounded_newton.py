"""Newton's method under lower bounds, for a few numbers whose gradient and Hessian are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LONGEST = 4.0  # of a step in any direction
SMALL, ESCAPES = 0.1, 4  # a bound where the gradient is 0 by symmetry is left by so much, at most so often
FLOOR = 1e-10  # of the curvature of a direction, in parts of the largest
SETTLED, NOISE = 1e-9, 1e-7  # by how much a step promises to lower the value: the last one; less than what sums round


class Point(NamedTuple):
    """A value with its derivatives."""

    value: float
    gradient: Floats
    hessian: Floats


class Minimum(NamedTuple):
    at: Floats
    point: Point
    is_settled: bool
    evaluations: int


def minimise(
    evaluate: Callable[[Floats], Point], start: Floats, lower: Floats, steps: int = 60, longest: float = LONGEST
) -> Minimum:
    """A local minimum at or above `lower`; saddles on the bound, such as a variance of 0, are left."""
    x, count, escapes = np.maximum(start, lower), 1, 0
    point = evaluate(x)
    for _ in range(steps):
        held = (x <= lower) & (point.gradient >= -NOISE)
        stuck = held & (np.abs(point.gradient) <= NOISE) & (np.diag(point.hessian) < -NOISE)
        if stuck.any() and escapes < ESCAPES:
            x, escapes, count = np.where(stuck, lower + SMALL, x), escapes + 1, count + 1
            point = evaluate(x)
            continue
        step = newton_step(point, ~held, longest)
        promised = -float(point.gradient @ step)
        if promised <= SETTLED:  # what it lowers is less than rounding shows, but steps converge quadratically
            last = np.maximum(x + step, lower) if promised > 0 else x
            return Minimum(last, evaluate(last) if promised > 0 else point, True, count + 1)
        part, moved = 1.0, False
        while part > 1e-9:
            trial = np.maximum(x + part * step, lower)
            tried = evaluate(trial)
            count += 1
            if np.isfinite(tried.value) and tried.value <= point.value + 1e-14 * abs(point.value):
                x, point, moved = trial, tried, True
                break
            if promised < NOISE:
                break
            part *= 0.3
        if not moved:
            return Minimum(x, point, promised < NOISE, count)
    return Minimum(x, point, False, count)


def minimise_from_several(
    evaluate: Callable[[Floats], Point], start: Floats, lower: Floats, again: Floats, longest: float = LONGEST
) -> Minimum:
    """As `minimise`; one that ends on a bound is tried from other places too, for there may be a lower one elsewhere.

    `again` has by number how far from its bound it begins then.
    """
    best = minimise(evaluate, start, lower, longest=longest)
    count = best.evaluations
    if not (best.at <= lower + 1e-6).any():
        return best
    for part in (1.0, 0.2):
        away = np.where(np.isfinite(lower), np.maximum(best.at, lower + part * again), best.at)
        tried = minimise(evaluate, away, lower, longest=longest)
        count += tried.evaluations
        if tried.point.value < best.point.value - NOISE:
            best = tried
    return best._replace(evaluations=count)


def newton_step(point: Point, free: NDArray[np.bool_], longest: float = LONGEST) -> Floats:
    """Downhill among the free numbers, also where the curvature is negative."""
    step = np.zeros_like(point.gradient)
    if not free.any():
        return step
    values, vectors = np.linalg.eigh(point.hessian[np.ix_(free, free)])
    strength = np.maximum(np.abs(values), max(FLOOR * np.abs(values).max(), 1e-300))
    step[free] = -vectors @ ((vectors.T @ point.gradient[free]) / strength)
    largest = float(np.abs(step).max())
    return step * min(1.0, longest / largest) if largest > 0 else step
