"""Tensors in memory as convolutions like them: the channels last."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.trees import Tree


def channels_last(value: Tree) -> Tree:
    """The same numbers, of an image or a kernel in another order."""
    if isinstance(value, dict):
        return {k: channels_last(v) for k, v in value.items()}
    # not `contiguous`, which leaves the strides of a single channel as they are, and these decide on the kernel
    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


def channels_last_tree(t: Tree) -> Tree:
    parts = [k for k in ("params", "frozen", "center", "mask") if t[k] is not None]
    return t | {part: {k: channels_last(v) for k, v in t[part].items()} for part in parts}


def copy_channels_last(value: Tensor) -> Tensor:
    if value.dim() != 4:
        return value.clone()
    return torch.empty_like(value, memory_format=torch.channels_last).copy_(value)


def as_channels_last(place: Tensor) -> Tensor:
    """The same memory, for a tensor that is laid out so."""
    if place.dim() != 4:
        return place.detach()
    shape = torch.empty_like(place, device="meta", memory_format=torch.channels_last)
    return place.as_strided(shape.shape, shape.stride()).detach()
