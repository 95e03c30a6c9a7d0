"""Poisson regression by Newton's method: coefficients [features, outputs] of the logarithms of rates.

Every function serves one client and, under vmap, a stack: no step depends on a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.numerics.newton import Family

LARGEST = 50.0  # logarithm of a rate: beyond it a step has gone astray, and its likelihood says so


def _log_rates(x: Tensor, v: Tensor) -> Tensor:
    return (x @ v).clamp(max=LARGEST)


def log_likelihood(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> Tensor:
    """Summed over the rows that count; without the term that no coefficient is in."""
    eta = _log_rates(x, v)
    return ((y.to(eta.dtype) * eta - eta.exp()) * mask[:, None]).sum()


def derivatives(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and curvature (minus the Hessian) of the log-likelihood by the flat coefficients."""
    rates = _log_rates(x, v).exp()
    rest = (y.to(rates.dtype) - rates) * mask[:, None]
    return (x.mT @ rest).mT.reshape(-1), _curvature(x, rates * mask[:, None])


def _curvature(x: Tensor, weight: Tensor) -> Tensor:
    """X'WX of each output [features x outputs], with nothing between outputs."""
    outputs, size = weight.shape[1], x.shape[1]
    by_output = torch.einsum("ni,no,nj->oij", x, weight, x)
    eye = torch.eye(outputs, dtype=x.dtype, device=x.device)
    return (eye[:, None, :, None] * by_output[:, :, None, :]).reshape(outputs * size, outputs * size)


def left_out(x: Tensor, y: Tensor, mask: Tensor, penalty: Tensor, v: Tensor) -> Tensor:
    """Log-likelihood of every row under the coefficients of the others, by one Newton step; 0 for padding.

    Rad, Maleki, J. R. Stat. Soc. B 82, 2020.
    """
    eta, outputs, size = _log_rates(x, v), v.shape[1], x.shape[1]
    rates, counts = eta.exp(), y.to(eta.dtype)
    _, curvature = derivatives(x, y, mask, v)
    inverse = torch.linalg.inv(curvature + torch.diag(penalty)).reshape(outputs, size, outputs, size)
    leverage = torch.einsum("ni,oioj,nj->no", x, inverse, x)
    others = (eta + leverage * (rates - counts) / (1 - leverage * rates).clamp(min=1e-3)).clamp(max=LARGEST)
    return ((counts * others - others.exp()) * mask[:, None]).sum(1)


def start(x: Tensor, y: Tensor, mask: Tensor, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """The working response of rates near the counts themselves, from which no step is too long."""
    rates = y.to(x.dtype) + 0.5
    response = (rates.log() - 0.5 / rates) * mask[:, None]
    b = (x.mT @ (rates * response)).mT.reshape(-1)
    return _curvature(x, rates * mask[:, None]), b[:, None], (rates * response.square()).sum()


POISSON = Family(log_likelihood, derivatives, left_out, start)
