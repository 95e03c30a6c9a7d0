"""U-Net for images (Ronneberger, Fischer, Brox, MICCAI 2015) and volumes (Cicek et al., MICCAI 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.errors import ConfigError

Norm = Literal["instance", "batch", "none"]


class UNet(nn.Module):
    """Scores of every pixel or voxel; the head is the last layer. Any size of image will do.

    Half the resolution from one of `channels` to the next, by max-pooling and back by repeating; `convolutions` of 3 by
    3 (by 3) at each, in the encoder as in the decoder. Instance norm depends on no other image, so that clients may be
    stacked.
    """

    head = ("out",)

    def __init__(
        self,
        shape: tuple[int, ...],
        outputs: int,
        channels: tuple[int, ...] = (16, 32, 64, 128),
        convolutions: int = 2,
        fold: int = 1,
        norm: Norm = "instance",
    ) -> None:
        super().__init__()
        if len(shape) not in (3, 4):
            raise ValueError("takes images [channels, height, width] or volumes [channels, depth, height, width]")
        if norm not in ("instance", "batch", "none"):
            raise ConfigError(f'model.norm = "{norm}": instance, batch or none')
        if not isinstance(channels, list | tuple) or min(*channels, len(channels), convolutions, fold) < 1:
            sizes = f"channels = {channels!r}, convolutions = {convolutions!r}, fold = {fold!r}"
            raise ConfigError(f"model: {sizes}: must be whole numbers above 0")
        self.dimensions, self.fold = len(shape) - 1, fold

        def block(inputs: int, width: int) -> nn.Sequential:
            return _block(inputs, width, convolutions, norm, self.dimensions)

        self.down = nn.ModuleList(block(a, b) for a, b in pairwise((shape[0] * fold**self.dimensions, *channels)))
        self.up = nn.ModuleList(block(below + width, width) for width, below in pairwise(channels))
        self.out = _convolution(self.dimensions)(channels[0], outputs * fold**self.dimensions, 1)

    def forward(self, x: Tensor) -> Tensor:
        pool = F.max_pool2d if self.dimensions == 2 else F.max_pool3d
        size, skipped = x.shape[2:], list[Tensor]()
        x = fold_space(x, self.fold)
        for i, block in enumerate(self.down):
            x = block(pool(x, 2, ceil_mode=True) if i else x)
            skipped.append(x)
        for block, skip in zip(reversed(self.up), reversed(skipped[:-1]), strict=True):
            x = block(torch.cat([F.interpolate(x, size=skip.shape[2:], mode="nearest"), skip], dim=1))
        return unfold_space(self.out(x), self.fold, size)


def fold_space(x: Tensor, factor: int) -> Tensor:
    """Blocks of pixels as channels of one pixel; images are padded at their ends to whole blocks."""
    if factor == 1:
        return x
    ends = [n for size in reversed(x.shape[2:]) for n in (0, -size % factor)]
    x = F.pad(x, ends) if any(ends) else x
    dimensions, space = x.dim() - 2, [n // factor for n in x.shape[2:]]
    blocks = x.reshape(*x.shape[:2], *(n for size in space for n in (size, factor)))
    order = [0, 1, *range(3, 3 + 2 * dimensions, 2), *range(2, 2 + 2 * dimensions, 2)]
    return blocks.permute(order).reshape(x.shape[0], -1, *space)


def unfold_space(x: Tensor, factor: int, size: Sequence[int]) -> Tensor:
    """The way back, and what was padded is cut off."""
    if factor == 1:
        return x
    dimensions, space = x.dim() - 2, x.shape[2:]
    blocks = x.reshape(x.shape[0], -1, *[factor] * dimensions, *space)
    order = [0, 1, *(i for d in range(dimensions) for i in (2 + dimensions + d, 2 + d))]
    whole = blocks.permute(order).reshape(x.shape[0], blocks.shape[1], *(n * factor for n in space))
    inside: Any = (..., *(slice(n) for n in size))
    return whole[inside]


def _block(inputs: int, width: int, convolutions: int, norm: Norm, dimensions: int) -> nn.Sequential:
    """Convolutions, each with norm and ReLU; a norm takes the place of the bias."""
    layers: list[nn.Module] = []
    for before in (inputs, *[width] * (convolutions - 1)):
        layers.append(_convolution(dimensions)(before, width, 3, padding=1, bias=norm == "none"))
        if norm == "instance":
            layers.append(nn.GroupNorm(width, width))  # the same as InstanceNorm, and faster
        elif norm == "batch":
            layers.append((nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm3d)(width))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _convolution(dimensions: int) -> type[nn.Conv2d | nn.Conv3d]:
    return nn.Conv2d if dimensions == 2 else nn.Conv3d
