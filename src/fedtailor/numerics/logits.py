"""Logistic and multinomial regression by Newton's method: coefficients [features, classes - 1], the first class has 0.

Every function serves one client and, under vmap, a stack: no step depends on a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = (1.0, 0.5, 0.1, 0.0)  # parts of a Newton step that are tried; the best is taken


def flat(v: Tensor) -> Tensor:
    """Coefficients one class after the other."""
    return v.mT.reshape(-1)


def unflat(v: Tensor, outputs: int) -> Tensor:
    return v.reshape(outputs, -1).mT


def log_probabilities(x: Tensor, v: Tensor) -> Tensor:
    """[rows, classes]"""
    scores = x @ v
    return torch.cat([torch.zeros_like(scores[:, :1]), scores], dim=1).log_softmax(1)


def log_likelihood(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> Tensor:
    """Summed over the rows that count."""
    return (log_probabilities(x, v).gather(1, y[:, None])[:, 0] * mask).sum()


def derivatives(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and curvature (minus the Hessian) of the log-likelihood by the flat coefficients."""
    p = log_probabilities(x, v).exp()[:, 1:]
    classes = p.shape[1]
    wanted = (y[:, None] == torch.arange(1, classes + 1, device=y.device)).to(p.dtype)
    gradient = flat(x.mT @ ((wanted - p) * mask[:, None]))
    rows = []
    for c in range(classes):
        parts = []
        for d in range(classes):
            weight = (p[:, c] * ((1.0 if c == d else 0.0) - p[:, d])) * mask
            parts.append(x.mT @ (weight[:, None] * x))
        rows.append(torch.cat(parts, dim=1))
    return gradient, torch.cat(rows, dim=0)


def mode(x: Tensor, y: Tensor, mask: Tensor, beta: Tensor, factor: Tensor, z: Tensor, steps: int) -> Tensor:
    """The z that maximises log-likelihood(beta + L z) - |z|^2 / 2, from a start."""
    outputs = beta.shape[1]
    eye = torch.eye(factor.shape[0], dtype=factor.dtype, device=factor.device)

    def value(z: Tensor) -> Tensor:
        return log_likelihood(x, y, mask, beta + unflat(factor @ z, outputs)) - z.square().sum() / 2

    for _ in range(steps):
        gradient, curvature = derivatives(x, y, mask, beta + unflat(factor @ z, outputs))
        step = torch.linalg.solve(factor.mT @ curvature @ factor + eye, factor.mT @ gradient - z)
        z = _furthest_up(value, z, step)
    return z


def penalised(x: Tensor, y: Tensor, mask: Tensor, penalty: Tensor, v: Tensor, steps: int) -> Tensor:
    """argmax log-likelihood(v) - sum(penalty v^2) / 2, from a start; `penalty` is per coefficient, flat."""
    outputs = v.shape[1]

    def value(u: Tensor) -> Tensor:
        return log_likelihood(x, y, mask, unflat(u, outputs)) - (penalty * u.square()).sum() / 2

    u = flat(v)
    for _ in range(steps):
        gradient, curvature = derivatives(x, y, mask, unflat(u, outputs))
        u = _furthest_up(value, u, torch.linalg.solve(curvature + torch.diag(penalty), gradient - penalty * u))
    return unflat(u, outputs)


def _furthest_up(value: object, start: Tensor, step: Tensor) -> Tensor:
    points = torch.stack([start + part * step for part in STEPS])
    values = torch.stack([value(point) for point in points])  # type: ignore[operator]
    best = values.nan_to_num(nan=-torch.inf).argmax()
    return (torch.nn.functional.one_hot(best, len(STEPS)).to(step.dtype)[:, None] * points.nan_to_num()).sum(0)


def left_out(x: Tensor, y: Tensor, mask: Tensor, penalty: Tensor, v: Tensor) -> Tensor:
    """Log-likelihood of every row under the coefficients of the others, by one Newton step; 0 for padding.

    Rad, Maleki, J. R. Stat. Soc. B 82, 2020.
    """
    p = log_probabilities(x, v).exp()[:, 1:]
    classes, size = p.shape[1], x.shape[1]
    _, curvature = derivatives(x, y, mask, v)
    inverse = torch.linalg.inv(curvature + torch.diag(penalty)).reshape(classes, size, classes, size)
    leverage = torch.einsum("ni,cidj,nj->ncd", x, inverse, x)
    wanted = (y[:, None] == torch.arange(1, classes + 1, device=y.device)).to(p.dtype)
    weight = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    eye = torch.eye(classes, dtype=p.dtype, device=p.device)
    inner = eye - leverage @ weight + 1e-6 * eye
    shift = torch.linalg.solve(inner, leverage @ (p - wanted)[:, :, None])[:, :, 0]
    scores = x @ v + shift
    scores = torch.cat([torch.zeros_like(scores[:, :1]), scores], dim=1).log_softmax(1)
    return scores.gather(1, y[:, None])[:, 0] * mask
