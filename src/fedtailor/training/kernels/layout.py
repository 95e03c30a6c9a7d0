"""Tensors in memory as convolutions in two and three dimensions like them: the channels last."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.trees import Tree

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def channels_last(value: Tree) -> Tree:
    """The same numbers, of an image or a kernel in another order."""
    if isinstance(value, dict):
        return {k: channels_last(v) for k, v in value.items()}
    # not `contiguous`, which leaves the strides of a single channel as they are, and these decide on the kernel
    return value.to(memory_format=LAST[value.dim()]) if value.dim() in LAST else value


def channels_last_tree(t: Tree) -> Tree:
    parts = [k for k in ("params", "frozen", "center", "mask") if t[k] is not None]
    return t | {part: {k: channels_last(v) for k, v in t[part].items()} for part in parts}


def copy_channels_last(value: Tensor) -> Tensor:
    if value.dim() not in LAST:
        return value.clone()
    return torch.empty_like(value, memory_format=LAST[value.dim()]).copy_(value)


def as_channels_last(place: Tensor) -> Tensor:
    """The same memory, for a tensor that is laid out so."""
    if place.dim() not in LAST:
        return place.detach()
    shape = torch.empty_like(place, device="meta", memory_format=LAST[place.dim()])
    return place.as_strided(shape.shape, shape.stride()).detach()
