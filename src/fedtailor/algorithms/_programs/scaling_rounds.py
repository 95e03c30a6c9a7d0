"""Means and spreads of numbers over all sites, from sums: first of logarithms, so that no sum is large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.algorithm import Algorithm, ReplySpec
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.numerics import ridge

SAME = 1e-9  # columns that are standardised already stay as they are


def _example(algorithm: Algorithm, model: Model) -> Tensor:
    w = ridge.as_vector(model, model.params)
    return w.new_zeros((2, len(w) - 1 + w.shape[1]))


MOMENTS = ReplySpec("moments of columns", _example).summed()


def no_scale(me: ClientContext) -> Tensor:
    """A zero for every feature and output."""
    w = ridge.as_vector(me.model, me.model.params)
    return w.new_zeros(len(w) - 1 + w.shape[1])


def moments_of(
    me: ClientContext, step: Tensor, center: Tensor, unit: Tensor, is_number: list[bool] | None = None
) -> Tensor:
    """Rows, and of each number one of: log(1 + |v|), v / unit, (v / unit - center)^2; 0 of what is no number."""
    x, y, mask = me.train
    x = x.flatten(1)
    preparation, outputs = me.experiment.data.preparation, len(no_scale(me)) - x.shape[1]
    if is_number is None:
        kinds = [] if preparation is None else [c.kind == "number" for c in preparation.columns for _ in c.features]
        is_number = [*(kinds or [False] * x.shape[1]), *[y.is_floating_point()] * outputs]
    v = torch.cat([x, y if y.is_floating_point() else y.new_zeros((len(y), outputs)).to(x.dtype)], dim=1)
    near = v / unit
    tried = torch.stack([v.abs().log1p(), near, (near - center).square()])
    counts = x.new_tensor(is_number) * mask.sum()
    return torch.stack([counts, (counts > 0) * (mask[:, None] * (step[:, None, None] * tried).sum(0)).sum(0)])


def agree_scales(fed: Federation, moments: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and spread of each column over the training rows of all sites, 0 and 1 of what is no number; and whether
    numbers are to be predicted."""
    none = torch.zeros_like(_example(None, fed.model)[0])  # type: ignore[arg-type]
    step = torch.diag(none.new_ones(3))

    def mean(at: int, center: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
        count, total = fed.sum(fed.map(moments, step[at], center, unit))
        return count, total / count.clamp(min=1)

    count, logs = mean(0, none, none + 1)
    unit = torch.where(count > 0, logs.expm1(), 1)
    unit = torch.where(unit > 0, unit, 1)
    _, center = mean(1, none, unit)
    _, squares = mean(2, center, unit)
    spread = squares.sqrt()
    spread = torch.where(spread > 1e-12 * center.abs(), spread, 1)  # of a constant only rounding is left
    center, spread = center * unit, spread * unit
    is_same = (count == 0) | ((center.abs() < SAME) & ((spread - 1).abs() < SAME))
    return torch.where(is_same, 0, center), torch.where(is_same, 1, spread), count[-1] > 0


def unscale(v: Tensor, center: Tensor, spread: Tensor, is_class: bool) -> Tensor:
    """Coefficients [features + 1, outputs] for columns as they were."""
    features = len(v) - 1
    slopes = v[:-1] / spread[:features, None]
    level = v[-1] - center[:features] @ slopes
    if not is_class:
        slopes, level = slopes * spread[features:], level * spread[features:] + center[features:]
    return torch.cat([slopes, level[None]])
