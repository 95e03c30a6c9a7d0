"""Newton's method for a likelihood that is concave in its coefficients [features, outputs].

Every function serves one client and, under vmap, a stack: no step depends on a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = (1.0, 0.5, 0.1, 0.0)  # parts of a Newton step that are tried; the longest of the best is taken

Of = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Family(NamedTuple):
    """What is known of a likelihood; x, y, mask and coefficients go in."""

    log_likelihood: Of  # summed over the rows that count
    derivatives: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # gradient, minus the Hessian; flat
    left_out: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of every row, by the coefficients of others
    start: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]  # a first working response's A, b, c


def flat(v: Tensor) -> Tensor:
    """Coefficients one output after the other."""
    return v.mT.reshape(-1)


def unflat(v: Tensor, outputs: int) -> Tensor:
    return v.reshape(outputs, -1).mT


def mode(
    family: Family,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    beta: Tensor,
    factor: Tensor,
    z: Tensor,
    steps: int,
    parts: tuple[float, ...] = STEPS,
) -> Tensor:
    """The z that maximises log-likelihood(beta + L z) - |z|^2 / 2, from a start."""
    outputs = beta.shape[1]

    def value(z: Tensor) -> Tensor:
        return family.log_likelihood(x, y, mask, beta + unflat(factor @ z, outputs)) - z.square().sum() / 2

    for _ in range(steps):
        z = _furthest_up(value, z, newton_step(family, x, y, mask, beta, factor, z), parts)
    return z


def newton_step(family: Family, x: Tensor, y: Tensor, mask: Tensor, beta: Tensor, factor: Tensor, z: Tensor) -> Tensor:
    eye = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
    gradient, curvature = family.derivatives(x, y, mask, beta + unflat(factor @ z, beta.shape[1]))
    return torch.linalg.solve(factor.mT @ curvature @ factor + eye, factor.mT @ gradient - z)


def penalised(
    family: Family, x: Tensor, y: Tensor, mask: Tensor, penalty: Tensor, v: Tensor, steps: int, center: Tensor
) -> Tensor:
    """argmax log-likelihood(v) - sum(penalty (v - center)^2) / 2, from a start; `penalty` is per coefficient, flat."""
    outputs, c = v.shape[1], flat(center)

    def value(u: Tensor) -> Tensor:
        return family.log_likelihood(x, y, mask, unflat(u, outputs)) - (penalty * (u - c).square()).sum() / 2

    u = flat(v)
    for _ in range(steps):
        gradient, curvature = family.derivatives(x, y, mask, unflat(u, outputs))
        u = _furthest_up(value, u, torch.linalg.solve(curvature + torch.diag(penalty), gradient - penalty * (u - c)))
    return unflat(u, outputs)


def _furthest_up(
    value: Callable[[Tensor], Tensor], start: Tensor, step: Tensor, parts: tuple[float, ...] = STEPS
) -> Tensor:
    points = torch.stack([start + part * step for part in parts])
    values = torch.stack([value(point) for point in points])
    values = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    # near the maximum values differ by rounding alone, which would keep the last steps from being whole ones
    peak = values.max()
    best = (values >= peak - 16 * torch.finfo(values.dtype).eps * peak.abs()).int().argmax()
    return (torch.nn.functional.one_hot(best, len(parts)).to(step.dtype)[:, None] * points.nan_to_num()).sum(0)
