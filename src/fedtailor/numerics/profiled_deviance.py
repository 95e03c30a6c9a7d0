"""The deviance of a linear mixed model from summed terms: X'V^-1 [X, y], y'V^-1 y and log|V|, with their derivatives.

Terms are known to second order around a relative factor, so the deviance and all that follows from it is, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtailor.numerics import forward_mode
from fedtailor.numerics.bounded_newton import Point


class Solved(NamedTuple):
    beta: Tensor  # [fixed], 0 for columns that were dropped
    inverse: Tensor  # of X'V^-1 X, [fixed, fixed]
    residual: Tensor  # y'V^-1 y after the fixed effects
    variance: Tensor
    logdet: Tensor  # of V, with that of X'V^-1 X where restricted
    freedom: float


def solve(terms: Tensor, fixed: int, kept: Tensor, rows: float, reml: bool) -> Solved:
    """Fixed effects and residual variance, given the relative factor that terms are of."""
    square = terms[:-1].reshape(fixed + 1, fixed + 1)
    at = torch.nonzero(kept)[:, 0]
    root = torch.linalg.cholesky(square[at][:, at])
    half = torch.linalg.solve_triangular(root, square[at][:, fixed:], upper=False)
    place = torch.zeros((fixed, len(at)), dtype=terms.dtype, device=terms.device)
    place[at, torch.arange(len(at), device=at.device)] = 1
    inverse = torch.linalg.inv(square[at][:, at])
    beta = torch.linalg.solve_triangular(root.mT, half, upper=True)[:, 0]
    residual = square[fixed, fixed] - half.square().sum()
    freedom = rows - len(at) if reml else rows
    logdet = terms[-1] + (2 * torch.diagonal(root).log().sum() if reml else 0)
    return Solved(place @ beta, place @ inverse @ place.mT, residual, residual / freedom, logdet, freedom)


def deviance(terms: Tensor, fixed: int, kept: Tensor, rows: float, reml: bool, sigma: Tensor | None = None) -> Tensor:
    """Minus twice the (restricted) log-likelihood; with the best residual variance if `sigma` is not given."""
    s = solve(terms, fixed, kept, rows, reml)
    if sigma is None:
        return s.logdet + s.freedom * (1 + (2 * math.pi * s.residual / s.freedom).log())
    return s.logdet + s.freedom * (2 * math.pi * sigma.square()).log() + s.residual / sigma.square()


def near(terms: Tensor, first: Tensor, second: Tensor, step: Tensor) -> Tensor:
    """The terms at a small step from where they are known."""
    return terms + first @ step + ((second @ step) @ step) / 2


def expand(terms: Tensor, first: Tensor, second: Tensor, fixed: int, kept: Tensor, rows: float, reml: bool) -> Point:
    """The deviance with its derivatives by the relative factor."""
    if not bool(torch.isfinite(terms).all()):
        return nowhere(first.shape[1])

    def value(step: Tensor) -> Tensor:
        return deviance(near(terms, first, second, step), fixed, kept, rows, reml)

    return point_of(value, first.new_zeros(first.shape[1]))


def expand_with_sigma(
    terms: Tensor, first: Tensor, second: Tensor, fixed: int, kept: Tensor, rows: float, reml: bool, sigma: Tensor
) -> Point:
    """The deviance with its derivatives by the relative factor and the residual standard deviation."""
    if not bool(torch.isfinite(terms).all()):
        return nowhere(first.shape[1] + 1)

    def value(step: Tensor) -> Tensor:
        return deviance(near(terms, first, second, step[:-1]), fixed, kept, rows, reml, sigma + step[-1])

    return point_of(value, first.new_zeros(first.shape[1] + 1))


def nowhere(size: int) -> Point:
    """Where a step has gone astray."""
    return Point(math.inf, np.zeros(size), np.zeros((size, size)))


def point_of(value: object, at: Tensor) -> Point:
    """A function's value, gradient and Hessian; infinite where it is not known."""
    if not len(at):
        return Point(float(value(at)), at.numpy(), at.numpy().reshape(0, 0))  # type: ignore[operator]
    gradient = torch.func.grad(value)(at)  # type: ignore[arg-type]
    hessian = forward_mode.hessian(value)(at)  # type: ignore[arg-type]
    hessian = (hessian + hessian.mT) / 2
    return Point(float(value(at)), gradient.double().numpy(), hessian.double().numpy())  # type: ignore[operator]
