"""Binomial counts and Poisson counts as likelihoods of rows, with all constants, for Laplace's approximation.

`y` has the count, the number of trials and the offset of every row; coefficients are [features, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedtailor.numerics.newton import Family

LARGEST = 100.0


def _binomial(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> Tensor:
    count, trials, eta = y[:, 0], y[:, 1], (x @ v)[:, 0] + y[:, 2]
    ways = torch.lgamma(trials + 1) - torch.lgamma(count + 1) - torch.lgamma(trials - count + 1)
    return (mask * (count * eta - trials * softplus(eta) + ways)).sum()


def _binomial_derivatives(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    count, trials, p = y[:, 0], y[:, 1], ((x @ v)[:, 0] + y[:, 2]).sigmoid()
    weight = trials * p * (1 - p) * mask
    return x.mT @ (mask * (count - trials * p)), x.mT @ (weight[:, None] * x)


def _poisson(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> Tensor:
    count, eta = y[:, 0], ((x @ v)[:, 0] + y[:, 2]).clamp(max=LARGEST)
    return (mask * (count * eta - eta.exp() - torch.lgamma(count + 1))).sum()


def _poisson_derivatives(x: Tensor, y: Tensor, mask: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    rate = ((x @ v)[:, 0] + y[:, 2]).clamp(max=LARGEST).exp()
    return x.mT @ (mask * (y[:, 0] - rate)), x.mT @ ((rate * mask)[:, None] * x)


def _unused(*args: object) -> Tensor:
    raise NotImplementedError


BINOMIAL = Family(_binomial, _binomial_derivatives, _unused, _unused)  # type: ignore[arg-type]
POISSON_COUNTS = Family(_poisson, _poisson_derivatives, _unused, _unused)  # type: ignore[arg-type]
FAMILIES = {"binomial": BINOMIAL, "poisson": POISSON_COUNTS}
