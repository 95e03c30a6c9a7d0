"""Cox's partial likelihood of one stratum, ties by Efron (J. Am. Stat. Assoc. 72, 1977), with its derivatives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST = 200.0  # of a linear predictor, beyond which a step has gone astray


class TieOrder(NamedTuple):
    """Rows from the longest time to the shortest, and of each row in this order, at whose time the ties begin and end.

    `share` is the part of the tied events that has left the risk set already.
    """

    order: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    share: NDArray[np.float64]


def tie_order(times: NDArray[np.float64], events: NDArray[np.float64]) -> TieOrder:
    order = np.lexsort((-events, -times))  # events first within a time
    t, e = times[order], events[order] > 0
    starts = np.flatnonzero(np.r_[True, t[1:] != t[:-1]])
    which = np.cumsum(np.r_[True, t[1:] != t[:-1]]) - 1
    stops = np.r_[starts[1:], len(t)] - 1
    dead = np.add.reduceat(e.astype(np.float64), starts)
    place = np.arange(len(t)) - starts[which]
    share = np.where(e, place / np.maximum(dead[which], 1), 0.0)
    return TieOrder(order, starts[which], stops[which], share)


def partial_likelihood(x: Tensor, event: Tensor, mask: Tensor, ties: tuple[Tensor, ...], beta: Tensor) -> Tensor:
    """Rows and what is known of them in the order of `ties`; its derivatives are those of the likelihood."""
    first, last, share = ties
    eta = (x @ beta).clamp(min=-LARGEST, max=LARGEST)
    shift = eta.detach().amax()
    risk = (eta - shift).exp() * mask
    dead = event * mask
    at_risk = risk.cumsum(0)[last]
    before = torch.cat([torch.zeros_like(risk[:1]), (risk * dead).cumsum(0)])
    tied = before[last + 1] - before[first]
    left = at_risk - share * tied
    terms = eta - shift - torch.where(dead > 0, left, torch.ones_like(left)).log()
    return (dead * torch.where(dead > 0, terms, torch.zeros_like(terms))).sum()
