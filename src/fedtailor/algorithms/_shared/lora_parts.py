"""Models with low-rank adapters under peft's names, and several adapters in the place of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

A, B = ".lora_A.", ".lora_B."


class Adapter(NamedTuple):
    """Of one layer: the names of both factors, and what their product is multiplied with."""

    a: str
    b: str
    scale: float

    def change(self, tensors: Params, x: Tensor) -> Tensor:
        """What it adds to the output of its layer."""
        return self.scale * linear(linear(x, tensors[self.a]), tensors[self.b])


Mix = Callable[[str, Adapter, Tensor], Tensor]  # (layer, its adapter, input) -> what is added to the layer's output


def names(model: Model, factor: str = ".lora_") -> list[str]:
    """Trained parameters of adapters, all or those of one factor."""
    return [k for k in model.trainable if factor in k]


def check_adapters(model: Model, title: str) -> None:
    """Raise a `ConfigError` when there are no adapters."""
    if not names(model, A) or not names(model, B):
        raise ConfigError(f"model.adapter: {title} is for models with LoRA adapters, but this one has none")


def check_dense_adapters(model: Model, title: str) -> None:
    """Raise a `ConfigError` when there are none, or some that are not of dense layers."""
    check_adapters(model, title)
    for layer in adapters(model):
        base = getattr(model.module.get_submodule(layer), "base_layer", None)
        if not isinstance(base, nn.Linear):
            raise ConfigError(f'model.adapter: {title} needs adapters of dense layers; "{layer}" is another')


def adapters(model: Model) -> dict[str, Adapter]:
    adapters = {}
    for a in names(model, A):
        layer, _, rest = a.partition(A)
        scaling: dict[str, float] = getattr(model.module.get_submodule(layer), "scaling", {})
        adapters[layer] = Adapter(a, f"{layer}{B}{rest}", scaling.get(rest.partition(".")[0], 1.0))
    return adapters


def mixed_outputs(model: Model, tensors: Params, x: Tree, mix: Mix, *, training: bool = False) -> Tensor:
    """Outputs of the model when `mix` says what is added to the layers that have an adapter."""

    def hook(layer: str, adapter: Adapter) -> Callable[..., Tensor]:
        def add(part: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return output + mix(layer, adapter, inputs[0])

        return add

    every = adapters(model)
    known = {k: v for k, v in tensors.items() if k in model.params or k in model.private_buffers}
    bare = known | {adapter.b: torch.zeros_like(known[adapter.b]) for adapter in every.values()}
    hooks = [model.module.get_submodule(name).register_forward_hook(hook(name, a)) for name, a in every.items()]
    try:
        return model(bare, x, training=training)
    finally:
        for registered in hooks:
            registered.remove()
