"""A model by its layers: which tensors belong together, and what goes into them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params


def layers_of(model: Model) -> dict[str, int]:
    """The number of each tensor's layer: the module that it belongs to."""
    modules = list(dict.fromkeys(k.rpartition(".")[0] for k in model.params))
    return {k: modules.index(k.rpartition(".")[0]) for k in model.params}


def input_statistics(me: ClientContext, params: Params) -> Tensor:
    """Mean and standard deviation of what enters each layer, over a client's training samples; 0 where nothing does."""
    x, _, mask = me.train
    entered: dict[int, Tensor] = {}
    hooks = []
    for name, layer in {k.rpartition(".")[0]: layer for k, layer in layers_of(me.model).items()}.items():

        def look(module: torch.nn.Module, inputs: tuple[Tensor, ...], layer: int = layer) -> None:
            if inputs:
                entered.setdefault(layer, inputs[0].flatten(1).to(mask.dtype))

        hooks.append(me.model.module.get_submodule(name).register_forward_pre_hook(look))
    try:
        me.model(me.buffers | params, x)
    finally:
        for hook in hooks:
            hook.remove()
    share = mask / mask.sum()
    numbers = []
    for layer in range(len(hooks)):
        values = entered.get(layer, torch.zeros_like(mask)[:, None])
        mean = share @ values.mean(1)
        numbers += [mean, (share @ (values - mean).square().mean(1)).sqrt()]
    return torch.stack(numbers).detach()


def with_derivable_statistics(model: Model, tensors: Params) -> Params:
    """Tensors with which a model predicts the same, and which carry derivatives by BatchNorm's statistics.

    torch has none by running statistics. In prediction they are a scale and a shift: what they move is put into the
    layer's weight and bias, while they themselves are constants. Without weight and bias there is no derivative.
    """
    shifted = {k: v if k in model.trainable else v.detach() for k, v in tensors.items()}
    for name, part in model.module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and f"{prefix}weight" in tensors:
            mean, variance = (tensors[f"{prefix}running_{what}"] for what in ("mean", "var"))
            constant = (variance.detach() + part.eps).sqrt()
            weight = tensors[f"{prefix}weight"] * constant / (variance + part.eps).sqrt()
            shift = (mean.detach() - mean) * weight / constant
            shifted |= {f"{prefix}weight": weight, f"{prefix}bias": tensors[f"{prefix}bias"] + shift}
    return shifted
