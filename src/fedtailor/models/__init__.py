"""Models by name, or any nn.Module of the user's by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fedtailor.core.data import Shape
from fedtailor.core.model import BufferPolicy, Model, add_label_prior, is_under
from fedtailor.core.random import torch_stream
from fedtailor.errors import ConfigError, nearest
from fedtailor.models import adapters
from fedtailor.models.checkpointing import recompute
from fedtailor.models.deq import DEQMLP, DEQTransformer, deq_resnet_m, deq_resnet_s, deq_resnet_xs
from fedtailor.models.networks import CNN, FMNISTCNN, LSTM, MLP, LeNet5, Linear
from fedtailor.models.resnets import resnet8, resnet14, resnet18, resnet20, resnet34
from fedtailor.models.transformers import Transformer
from fedtailor.plugins import import_object

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": Linear,
    "mlp": MLP,
    "lstm": LSTM,
    "lenet5": LeNet5,
    "fmnist-cnn": FMNISTCNN,
    "cnn": CNN,
    "resnet8": resnet8,
    "resnet14": resnet14,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet34": resnet34,
    "transformer": Transformer,
    "deq-mlp": DEQMLP,
    "deq-resnet-xs": deq_resnet_xs,
    "deq-resnet-s": deq_resnet_s,
    "deq-resnet-m": deq_resnet_m,
    "deq-transformer": DEQTransformer,
}


def build(
    name: str,
    shape: Shape,
    outputs: int,
    *,
    seed: int,
    head: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    buffers: BufferPolicy = "private",
    prior: bool = False,
    dtype: torch.dtype = torch.float32,
    adapter: adapters.AdapterConfig | None = None,
    checkpoint: Sequence[str] = (),
) -> Model:
    """The model `name` ("mlp", or "package.module:Class") for samples of a shape; initial values from the seed."""
    kind = find(name)
    options = dict(options or {})
    known = set(inspect.signature(kind).parameters) - {"shape", "outputs"}
    for key in options:
        if key not in known:
            raise ConfigError(
                f'model.{key}: {name} has no option "{key}"; {nearest(key, known) if known else "it has none"}'
            )
    try:
        with torch_stream(seed, "model"):
            module = kind(shape, outputs, **options)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(shape, dict) and ":" not in name:
            parts = f"samples have several parts ({', '.join(shape)}), and {name} takes one tensor"
            raise ConfigError(f'model.name: {parts}; use a model of your own, "module:Class"') from None
        said = shape if isinstance(shape, dict) else list(shape)
        hint = "; it is called as Class(shape, outputs, **options)" if ":" in name else ""
        raise ConfigError(f"model.name: {name} does not fit samples of shape {said}: {error}{hint}") from None
    own_head = getattr(type(module), "head", ())  # of the class: an instance may have a layer called "head"
    if adapter is not None:
        with torch_stream(seed, "adapter"):
            adapters.add_lora(module, adapter, own_head)
        own_head = [part for part in own_head if any(is_under(k, part) for k in adapters.trained_parameters(module))]
    recompute(module, checkpoint)
    if prior:
        add_label_prior(module, outputs)
    make = partial(_initialise, kind, shape, outputs, options, adapter)
    return Model(module.to(dtype), head=head or own_head, buffers=buffers, make=make)


def _initialise(
    kind: Callable[..., nn.Module],
    shape: Shape,
    outputs: int,
    options: dict[str, Any],
    adapter: adapters.AdapterConfig | None,
    *key: str | int,
) -> nn.Module:
    """The module once more, with initial values from the streams of a key."""
    with torch_stream(*key, "model"):
        module = kind(shape, outputs, **options)
    if adapter is not None:
        with torch_stream(*key, "adapter"):
            adapters.add_lora(module, adapter, getattr(type(module), "head", ()))
    return module


def find(name: str) -> Callable[..., nn.Module]:
    """What makes the model `name`, or "module:Class"."""
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        hint = f'{nearest(name, MODELS)} (own models: "package.module:Class")'
        raise ConfigError(f'model.name: no model "{name}"; {hint}')
    kind = import_object("model.name", name)
    if not callable(kind):
        raise ConfigError(f'model.name: "{name}" is not a class or function that makes an nn.Module')
    return kind
