"""For losses that an algorithm gives to `me.sgd`: that of the task, and tensors trained beside those of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.task import LOSSES
from fedtailor.core.trees import Params


def task_loss(output: Tensor, y: Tensor) -> Tensor:
    """The loss of every sample: of numbers their squared error, of classes cross-entropy."""
    return LOSSES["regression" if y.is_floating_point() else "classification"](output, y)


def task_losses(model: Model, tensors: Params, x: Tensor, y: Tensor, *, training: bool = False) -> Tensor:
    """The same, of a model's outputs."""
    return task_loss(model(tensors, x, training=training), y)


def tilted_sgd(me: ClientContext, params: Params, tilt: Params, epochs: int) -> Params:
    """`me.sgd` with `tilt` added to the gradient of every step, as the gradient of <tilt, params> is."""
    model = me.model

    def loss(tensors: Params, x: Tensor, y: Tensor) -> Tensor:
        own = taken("tilt", tensors)
        known = {k: v for k, v in tensors.items() if not k.startswith("tilt.")}
        return task_losses(model, known, x, y, training=True) + sum((own[k] * known[k]).sum() for k in tilt)

    return me.sgd(params, epochs=epochs, frozen=beside("tilt", tilt), loss=loss)


def some_samples(me: ClientContext, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Training samples drawn for this call, `count` of them or all: x, y and a weight, which is 0 for padding.

    A loss of single samples can hold what depends on many, such as a mean of features, if it is taken over these.
    """
    x, y, mask = me.train
    rows = torch.where(mask > 0, me.uniform(len(x)), torch.inf).argsort()[:count]
    return x[rows], y[rows], mask[rows]


def beside(prefix: str, params: Params) -> Params:
    """The same tensors under names that the model does not have."""
    return {f"{prefix}.{k}": v for k, v in params.items()}


def taken(prefix: str, params: Params) -> Params:
    """Of tensors with such names, under the model's names again."""
    return {k.removeprefix(f"{prefix}."): v for k, v in params.items() if k.startswith(f"{prefix}.")}
