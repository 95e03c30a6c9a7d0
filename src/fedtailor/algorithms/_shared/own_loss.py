"""For losses that an algorithm gives to `me.sgd`: that of the task, and tensors trained beside those of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.context import ClientContext
from fedtailor.core.data import take
from fedtailor.core.trees import Params, Tree


def task_losses(me: ClientContext, tensors: Params, x: Tree, y: Tensor, *, training: bool = False) -> Tensor:
    """The task's loss of every sample."""
    return me.experiment.loss(me.model(tensors, x, training=training), y)


def tilted_sgd(me: ClientContext, params: Params, tilt: Params, epochs: int) -> Params:
    """`me.sgd` with `tilt` added to the gradient of every step, as the gradient of <tilt, params> is."""

    def loss(tensors: Params, x: Tree, y: Tensor) -> Tensor:
        own = without_prefix("tilt", tensors)
        known = {k: v for k, v in tensors.items() if not k.startswith("tilt.")}
        return task_losses(me, known, x, y, training=True) + sum((own[k] * known[k]).sum() for k in tilt)

    return me.sgd(params, epochs=epochs, frozen=beside("tilt", tilt), loss=loss)


def some_samples(me: ClientContext, count: int) -> tuple[Tree, Tensor, Tensor]:
    """Training samples drawn for this call, `count` of them or all: x, y and a weight, which is 0 for padding.

    A loss of single samples can hold what depends on many, such as a mean of features, if it is taken over these.
    """
    x, y, mask = me.train
    rows = torch.where(mask > 0, me.uniform(len(y)), torch.inf).argsort()[:count]
    return take(x, rows), y[rows], mask[rows]


def beside(prefix: str, params: Params) -> Params:
    """The same tensors under names that the model does not have."""
    return {f"{prefix}.{k}": v for k, v in params.items()}


def without_prefix(prefix: str, params: Params) -> Params:
    """Of tensors with such names, under the model's names again."""
    return {k.removeprefix(f"{prefix}."): v for k, v in params.items() if k.startswith(f"{prefix}.")}
