"""Random crop and flip of images. What is drawn is data, so that a client's work stays a function of its inputs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedtailor.core.segmentation import VOID

PAD = 4


def draw(rng: np.random.Generator, samples: int, pad: int = PAD) -> NDArray[np.int64]:
    """One row per sample: offsets from the top and from the left in 0..2 pad, and 1 to flip left and right."""
    return rng.integers([2 * pad + 1, 2 * pad + 1, 2], size=(samples, 3))


def augment(x: Tensor, offsets: Tensor, flips: Tensor, pad: int = PAD, fill: int = 0) -> Tensor:
    """Images [..., channels, height, width], cropped at `offsets` [..., 2] and flipped where `flips` [...] is true.

    Before, they are padded by `fill` on all sides. A crop has the size of the image; at offsets equal to `pad` it is
    the image.
    """
    *stack, channels, height, width = x.shape
    padded = F.pad(x, (pad,) * 4, value=fill).flatten(0, len(stack) - 1)
    top, left = offsets.reshape(-1, 2, 1).unbind(1)
    rows = top + torch.arange(height, device=x.device)
    columns = left + torch.arange(width, device=x.device)
    columns = torch.where(flips.reshape(-1, 1).bool(), columns.flip(1), columns)
    image = torch.arange(len(padded), device=x.device).reshape(-1, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).reshape(-1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]].reshape(x.shape)


def augment_target(y: Tensor, x: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Targets, which move with their images where they are images too, such as masks."""
    samples = flips.dim()
    if y.dim() - samples < 2 or y.shape[-2:] != x.shape[-2:]:
        return y
    planes = y.flatten(samples, -3) if y.dim() - samples > 2 else y.unsqueeze(-3)
    return augment(planes, offsets, flips, fill=VOID if y.dtype == torch.uint8 else 0).reshape(y.shape)
