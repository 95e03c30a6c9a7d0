"""Masks of images, in the form that segmentation takes: uint8, a class for every pixel or voxel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.core.data import count
from fedtailor.core.segmentation import VOID
from fedtailor.core.task import IGNORED
from fedtailor.core.trees import Tree, leaves
from fedtailor.errors import DataError

Parts = Mapping[str, Mapping[str, tuple[Any, Any]]]  # inputs and targets by client and split


def are_masks(parts: Parts) -> bool:
    """Whether all targets are as large as their images, and whole numbers."""
    pairs = [(x, y) for of in parts.values() for x, y in of.values() if isinstance(y, Tensor) and len(y)]
    return bool(pairs) and all(_is_mask(x, y) for x, y in pairs)


def _is_mask(x: Any, y: Tensor) -> bool:
    space = _first(x).shape[2:]
    if len(space) not in (2, 3) or y.shape[1:] not in (space, (1, *space)):
        return False
    return not y.is_floating_point() or bool(((y == 0) | (y == 1)).all()) or bool(((y == 0) | (y == VOID)).all())


def _first(x: Any) -> Tensor:
    """One sample, or the first part of it."""
    return leaves(x if isinstance(x, Tensor | dict) else x.read(torch.zeros(1, dtype=torch.int64, device="cpu")))[0]


def encode_masks(parts: Parts, name: str) -> dict[str, dict[str, tuple[Tree, Tensor]]]:
    """Masks as uint8 without a channel axis. What torch's losses ignore, -100, is void; 0 and 255 alone are 0 and 1."""
    encoded = {
        c: {s: (x, _encode(x, y, f'{name}: client "{c}"')) for s, (x, y) in of.items()} for c, of in parts.items()
    }
    known = {int(v) for of in encoded.values() for _, y in of.values() for v in y.unique()}
    if known <= {0, VOID} and VOID in known:
        encoded = {c: {s: (x, (y > 0).to(torch.uint8)) for s, (x, y) in of.items()} for c, of in encoded.items()}
    return encoded


def _encode(x: Any, y: Any, where: str) -> Tensor:
    if not isinstance(y, Tensor) or (count(x) and _first(x).dim() not in (4, 5)):
        raise DataError(f"{where}: images must be [rows, channels, (depth,) height, width] and masks numbers")
    if count(x) and y.dim() == _first(x).dim() and y.shape[1] == 1:
        y = y[:, 0]
    if y.is_floating_point() and not bool((y == y.round()).all()):
        raise DataError(f"{where}: the numbers of a mask must be whole, a class each")
    wrong = (y != IGNORED) & ((y < 0) | (y > VOID))
    if bool(wrong.any()):
        raise DataError(f"{where}: a mask has class {int(y[wrong][0])}; classes are 0 to 254, and 255 does not count")
    return torch.where(y == IGNORED, VOID, y).to(torch.uint8)


def pad_images(parts: list[tuple[Tree, Tensor]]) -> list[tuple[Tree, Tensor]]:
    """Images of several sizes padded at their ends to the largest, by 0 and by void."""
    images = [x for x, _ in parts]
    if not all(isinstance(x, Tensor) and x.dim() == images[0].dim() for x in images):
        return parts
    largest = (
        [max(x.shape[i] for x in images if len(x)) for i in range(2, images[0].dim())] if any(map(len, images)) else []
    )
    return [_pad(x, y, largest) for x, y in parts]


def _pad(x: Any, y: Tensor, size: list[int]) -> tuple[Tree, Tensor]:
    if list(x.shape[2:]) == size or not size:
        return x, y
    if not len(x):
        return x.new_zeros(0, x.shape[1], *size), y.new_zeros(0, *size)
    ends = [n for have, wanted in zip(reversed(x.shape[2:]), reversed(size), strict=True) for n in (0, wanted - have)]
    return F.pad(x, ends), F.pad(y, ends, value=VOID)
