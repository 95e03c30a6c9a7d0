"""Which fast path takes the steps of a training, if any: by the exact class of the model and by what is asked for.

All are written for the CPU: another device takes the general path. Never by the number of cores or threads: the same
configuration gives the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedtailor.core.trees import Params, Tree
from fedtailor.training.kernels import dense, descent, structure
from fedtailor.training.specification import Training

FastPath = Callable[[Training, Tree], tuple[Params, Params]]  # (training, tensors) -> params, buffers


def fast_path(training: Training, t: Tree) -> FastPath | None:
    """For steps that nobody differentiates; None: take them one by one."""
    is_known = not (training.solver.accumulate > 1 or training.is_own or t["memory"] is not None)
    if not (is_known and _are_on(training) and t["params"]):
        return None
    if not training.solver.is_plain:
        return None
    is_by_hand = (
        isinstance(training.data.x, Tensor)
        and training.loss in dense.GRADIENTS
        and not training.solver.augment
        and not t["buffers"]
    )
    if is_by_hand and structure.dense_layers(training.model):
        return dense.train_dense
    if training.is_stacked:
        return None
    layer = structure.head_layer(training.model) if is_by_hand else None
    if layer is not None and set(t["params"]) == {layer.weight, layer.bias}:
        return dense.train_head
    return None if training.model.warm_starts or training.model.rebound else descent.descend


def uses_channels_last(training: Training, differentiable: bool) -> bool:
    """Whether convolutions of the general path are computed with the channels last."""
    is_one = not (differentiable or training.is_stacked)
    return is_one and _are_on(training) and training.model.likes_channels_last


def _are_on(training: Training) -> bool:
    how = training.solver.arithmetic
    return how.kernels == "auto" and not (how.is_lower or how.compile) and training.model.device.type == "cpu"
