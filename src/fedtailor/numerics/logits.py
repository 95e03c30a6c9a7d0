"""Logistic and multinomial regression by Newton's method: coefficients [features, classes - 1], the first class has 0.

Every function serves one client and, under vmap, a stack: no step depends on a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.numerics.newton import Family, flat


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


def start(x: Tensor, y: Tensor, mask: Tensor, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """The working response of equal classes: curvature, curvature times it, and its own square."""
    gradient, curvature = derivatives(x, y, mask, x.new_zeros((x.shape[1], outputs)))
    return curvature, gradient[:, None], gradient.sum() * 0


LOGIT = Family(log_likelihood, derivatives, left_out, start)
