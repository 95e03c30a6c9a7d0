"""Which coefficients of a mixed model may vary between clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.algorithm import ReplySpec
from fedtailor.numerics import ridge
from fedtailor.numerics.reml import STRUCTURES, Entries, positions

MOST_TOGETHER = 8  # random coefficients that may have covariances

WITHIN = ReplySpec(
    "variation within the client",
    lambda algorithm, model: ridge.as_vector(model, model.params).new_zeros(
        (2, len(ridge.as_vector(model, model.params)))
    ),
)


def within(x: Tensor, mask: Tensor) -> Tensor:
    """Of every column the squares around its mean at this client, and around 0."""
    count = mask.sum().clamp(min=1)
    return torch.stack([(mask[:, None] * (x - x.sum(0) / count)).square().sum(0), x.square().sum(0)])


def varying(total: Tensor, is_intercept: Tensor) -> Tensor:
    """Columns that are not constant at every client: only these can have a slope that differs."""
    return (total[0] > 1e-9 * total[1]) | is_intercept


def free_entries(effects: str, varies: Tensor, is_intercept: Tensor) -> list[Entries]:
    """The structures to try, from simple to rich."""
    wanted = list(STRUCTURES) if effects == "auto" else [effects]
    if effects == "auto" and int(varies.sum()) > MOST_TOGETHER:
        wanted.remove("full")
    if not is_intercept.any():
        wanted = [name for name in wanted if name != "intercept"] or ["none"]
    mask, intercept = varies.cpu().numpy().astype(bool), is_intercept.cpu().numpy().astype(bool)
    return [positions(name, np.asarray(mask), np.asarray(intercept)) for name in wanted]
