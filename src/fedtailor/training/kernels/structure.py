"""What fast paths know of a model, by its exact class: a subclass may compute something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from fedtailor.core.model import Model

T = TypeVar("T", bound=type[nn.Module])

_DENSE: dict[type, Callable[[Any], tuple[str, ...]]] = {}
_HEADS: dict[type, str] = {}


@dataclass(frozen=True)
class AffineLayer:
    """The names of the tensors of an affine map; between two of them there is a ReLU."""

    weight: str
    bias: str | None


def dense_stack(layers: Callable[[Any], tuple[str, ...]]) -> Callable[[T], T]:
    """Declare a class whose forward pass flattens its input and runs these nn.Linear layers, with ReLU between them."""

    def declare(kind: T) -> T:
        _DENSE[kind] = layers
        return kind

    return declare


def split_at_head(head: str) -> Callable[[T], T]:
    """Declare a class whose forward pass is its layer `head` applied to what its method `before_head` gives."""

    def declare(kind: T) -> T:
        _HEADS[kind] = head
        return kind

    return declare


def dense_layers(model: Model) -> tuple[AffineLayer, ...]:
    """The layers of a model that is a stack of dense ones, else none."""
    names_of = _DENSE.get(type(model.module))
    if names_of is None or model.private_buffers or not is_untouched(model.module):
        return ()
    names = names_of(model.module)
    if any(type(model.module.get_submodule(name)) is not nn.Linear for name in names):
        return ()
    layers = tuple(AffineLayer(f"{n}.weight", f"{n}.bias" if f"{n}.bias" in model.params else None) for n in names)
    known = {k for layer in layers for k in (layer.weight, layer.bias) if k}
    return layers if known == model.params.keys() else ()


def head_layer(model: Model) -> AffineLayer | None:
    """The last layer of a model that is declared to be split there, if that is all of its head."""
    name = _HEADS.get(type(model.module))
    if name is None or model.batch_statistics or model.private_buffers or not is_untouched(model.module):
        return None
    layer = AffineLayer(f"{name}.weight", f"{name}.bias")
    is_all = set(model.head) == {layer.weight, layer.bias}
    return layer if is_all and type(model.module.get_submodule(name)) is nn.Linear else None


def is_untouched(module: nn.Module) -> bool:
    """Whether a module computes what its class says: nobody has hooked into it or given a part another forward."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks or "forward" in vars(m)
        for m in module.modules()
    )
