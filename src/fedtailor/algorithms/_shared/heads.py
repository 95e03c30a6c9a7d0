"""Heads of one dense layer, for methods that need to know its shape."""

from __future__ import annotations

from torch import Tensor

from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError


def check_dense_head(model: Model, title: str) -> None:
    """Raise a `ConfigError` when the head is not one dense layer."""
    if [v.dim() for v in model.head.values() if v.dim() > 1] != [2]:
        raise ConfigError(f"model.head: {title} needs a head of one dense layer; this model's head is another")


def weight_of_head(model: Model) -> Tensor:
    """The matrix [classes, features] of the head."""
    return next(v for v in model.head.values() if v.dim() == 2)


def dense(head: Params, f: Tensor) -> Tensor:
    """Outputs of a head of one dense layer, whatever its entries are called."""
    weight = next(v for v in head.values() if v.dim() == 2)
    return f @ weight.T + sum(v for v in head.values() if v.dim() == 1)
