"""Models by name, or any nn.Module of the user's by import path."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedtailor.core.data import Shape
from fedtailor.core.model import BufferPolicy, Model, add_label_prior, call_module, is_under
from fedtailor.core.module_state import BufferChanges, cast, refuse_types
from fedtailor.core.random import torch_stream
from fedtailor.errors import ConfigError, nearest
from fedtailor.models import adapters
from fedtailor.models.checkpointing import recompute
from fedtailor.models.deq import DEQMLP, DEQTransformer, deq_resnet_m, deq_resnet_s, deq_resnet_xs
from fedtailor.models.networks import CNN, FMNISTCNN, LSTM, MLP, LeNet5, Linear
from fedtailor.models.resnets import resnet8, resnet14, resnet18, resnet20, resnet34
from fedtailor.models.transformers import Transformer
from fedtailor.models.unet import UNet
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
    "unet": UNet,
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
    known, takes_any = _options(kind)
    for key in options:
        if key not in known and not takes_any:
            raise ConfigError(
                f'model.{key}: {name} has no option "{key}"; {nearest(key, known) if known else "it has none"}'
            )
    try:
        with torch_stream(seed, "model"):
            module = kind(shape, outputs, **options)
            if is_own(name):
                _refuse_no_module(name, module)
                _fill_lazy_parts(module, shape, dtype)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(shape, dict) and not is_own(name):
            parts = f"samples have several parts ({', '.join(shape)}), and {name} takes one tensor"
            raise ConfigError(f'model.name: {parts}; use a model of your own, "module:Class"') from None
        said = shape if isinstance(shape, dict) else list(shape)
        hint = "; it is called as Class(shape, outputs, **options)" if is_own(name) else ""
        raise ConfigError(f"model.name: {name} does not fit samples of shape {said}: {error}{hint}") from None
    own_head = _head_of(type(module))
    if adapter is not None:
        with torch_stream(seed, "adapter"):
            adapters.add_lora(module, adapter, own_head)
        own_head = [part for part in own_head if any(is_under(k, part) for k in adapters.trained_parameters(module))]
    recompute(module, checkpoint)
    if prior:
        add_label_prior(module, outputs)
    if is_own(name):
        refuse_types(module, dtype)
    make = (
        None if isinstance(kind, ModelCopies) else partial(_initialise, kind, shape, outputs, options, adapter, dtype)
    )
    model = Model(cast(module, dtype), head=head or own_head, buffers=buffers, make=make)
    return model if is_own(name) else model.remember(BufferChanges(frozenset(), frozenset()))


def _initialise(
    kind: Callable[..., nn.Module],
    shape: Shape,
    outputs: int,
    options: dict[str, Any],
    adapter: adapters.AdapterConfig | None,
    dtype: torch.dtype,
    *key: str | int,
) -> nn.Module:
    """The module once more, with initial values from the streams of a key."""
    with torch_stream(*key, "model"):
        module = kind(shape, outputs, **options)
        _fill_lazy_parts(module, shape, dtype)
    if adapter is not None:
        with torch_stream(*key, "adapter"):
            adapters.add_lora(module, adapter, _head_of(type(module)))
    return module


def is_own(name: str) -> bool:
    """Whether a name stands for a model of the user's."""
    return ":" in name or name in _registered


@dataclass(frozen=True)
class ModelCopies:
    """Copies of a module, with the weights that it has, in place of a class."""

    module: nn.Module

    def __call__(self, shape: Shape, outputs: int) -> nn.Module:
        return copy.deepcopy(self.module)


_registered: dict[str, Callable[..., nn.Module]] = {}  # by a name that this process gave them


def register(model: nn.Module | Callable[..., nn.Module]) -> str:
    """A name for a module, or for a class or function that no other process can import; it is known in this process.

    Args:
        model: A module, whose weights are those that a run begins with; or what makes one.

    Returns:
        The name.
    """
    is_module = isinstance(model, nn.Module)
    name = f"own-{type(model).__name__ if is_module else getattr(model, '__name__', 'model')}".lower()
    _registered[name] = ModelCopies(copy.deepcopy(model)) if isinstance(model, nn.Module) else model
    return name


def source_of(kind: Any) -> Any:
    """The class or function whose source makes the models of `kind`."""
    return type(kind.module) if isinstance(kind, ModelCopies) else kind


def _options(kind: Callable[..., nn.Module]) -> tuple[set[str], bool]:
    """The options of a model by name, and whether it takes any other."""
    parameters = inspect.signature(kind).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {k for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return named - {"shape", "outputs"}, takes_any


def _refuse_no_module(name: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name: {name} made a {type(module).__name__}, which is no nn.Module")


def _fill_lazy_parts(module: nn.Module, shape: Shape, dtype: torch.dtype) -> None:
    """Let layers such as LazyLinear see a sample of zeros, from which they take their shapes."""
    if not any(is_lazy(v) for v in (*module.parameters(), *module.buffers())):
        return
    for of in (dtype, torch.int64):
        sizes = shape if isinstance(shape, dict) else {"": shape}
        parts = {k: torch.zeros(2, *size, dtype=of, device="cpu") for k, size in sizes.items()}
        try:
            with torch.no_grad():
                call_module(cast(module, dtype), parts if isinstance(shape, dict) else parts[""])
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
        else:
            return
    raise ValueError(f"its lazy layers find no shape in a sample of zeros ({reason})")


def _head_of(kind: type[nn.Module]) -> Sequence[str]:
    """Of the class: an instance may have a layer called "head"."""
    head = getattr(kind, "head", ())
    return (head,) if isinstance(head, str) else head if isinstance(head, tuple | list) else ()


def find(name: str) -> Callable[..., nn.Module]:
    """What makes the model `name`, or "module:Class"."""
    if name in MODELS:
        return MODELS[name]
    if name in _registered:
        return _registered[name]
    if ":" not in name:
        hint = f'{nearest(name, MODELS)} (own models: "package.module:Class")'
        raise ConfigError(f'model.name: no model "{name}"; {hint}')
    kind = import_object("model.name", name)
    if not callable(kind):
        raise ConfigError(f'model.name: "{name}" is not a class or function that makes an nn.Module')
    return kind
