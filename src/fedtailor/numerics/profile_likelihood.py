"""Intervals by the profile of a deviance: where it has risen by a quantile of chi squared, all else at its best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedtailor.numerics import forward_mode
from fedtailor.numerics.bounded_newton import Floats, Minimum, Point, minimise

CLOSE, TRIES = 1e-7, 40


def transformed(evaluate: Callable[[Floats], Point], change: Callable[[Tensor], Tensor]) -> Callable[[Floats], Point]:
    """The same function of other coordinates; `change` leads from these to those of `evaluate`."""

    def of_coordinates(psi: Floats) -> Point:
        at = torch.from_numpy(psi)
        point = evaluate(change(at).numpy())
        jacobian = forward_mode.jacobian(change)(at).numpy()
        bends = forward_mode.jacobian(forward_mode.jacobian(change))(at).numpy()
        hessian = jacobian.T @ point.hessian @ jacobian + np.einsum("k,kij->ij", point.gradient, bends)
        return Point(point.value, jacobian.T @ point.gradient, hessian)

    return of_coordinates


def endpoint(
    evaluate: Callable[[Floats], Point], best: Minimum, lower: Floats, direction: int, limit: float, rise: float
) -> float:
    """Where the profile of the first coordinate has risen by `rise`, or `limit` if it does not before; NaN if lost."""
    start, inside, outside = float(best.at[0]), float(best.at[0]), limit
    inverse = np.linalg.pinv(best.point.hessian, hermitian=True)
    guess = start + direction * np.sqrt(rise * max(2 * inverse[0, 0], 1e-300))
    at = guess if (limit - guess) * direction > 0 else (start + limit) / 2
    rest, checked = best.at[1:], not np.isfinite(limit)
    for _ in range(TRIES):
        point, rest = _at_best(evaluate, at, rest, lower)
        risen = point.value - best.point.value
        if abs(risen - rise) <= CLOSE * max(rise, 1.0):
            return at
        inside, outside = (at, outside) if risen < rise else (inside, at)
        if risen < rise and not checked:  # does it rise enough at all?
            checked = True
            if _at_best(evaluate, limit, rest, lower)[0].value - best.point.value < rise:
                return limit
        height = np.sqrt(max(risen, 1e-12))
        by = point.gradient[0] / (2 * height)
        new = at - (height - np.sqrt(rise)) / by if by * direction > 0 else np.nan
        if not np.isfinite(new) or not min(inside, outside) < new < max(inside, outside):
            new = (inside + outside) / 2 if np.isfinite(outside) else at + 2 * (at - start)
        if abs(new - at) <= 1e-12 * max(abs(at), 1e-12):
            return float(new)
        at = float(new)
    return float("nan")


def _at_best(evaluate: Callable[[Floats], Point], first: float, rest: Floats, lower: Floats) -> tuple[Point, Floats]:
    """The least value where the first coordinate is fixed, with all derivatives."""
    known: dict[bytes, Point] = {}

    def without_first(others: Floats) -> Point:
        point = known[others.tobytes()] = evaluate(np.concatenate([[first], others]))
        return Point(point.value, point.gradient[1:], point.hessian[1:, 1:])

    found = minimise(without_first, rest, lower[1:], longest=1.0)
    return known[found.at.tobytes()], found.at
