"""Random crop and flip of images. What is drawn is data, so that a client's work stays a function of its inputs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

PAD = 4


def draw(rng: np.random.Generator, samples: int, pad: int = PAD) -> NDArray[np.int64]:
    """One row per sample: offsets from the top and from the left in 0..2 pad, and 1 to flip left and right."""
    return rng.integers([2 * pad + 1, 2 * pad + 1, 2], size=(samples, 3))


def augment(x: Tensor, offsets: Tensor, flips: Tensor, pad: int = PAD) -> Tensor:
    """Images [..., channels, height, width], cropped at `offsets` [..., 2] and flipped where `flips` [...] is true.

    Before, they are padded by zeros on all sides. A crop has the size of the image; at offsets equal to `pad` it is
    the image.
    """
    *stack, channels, height, width = x.shape
    padded = F.pad(x, (pad,) * 4).flatten(0, len(stack) - 1)
    top, left = offsets.reshape(-1, 2, 1).unbind(1)
    rows = top + torch.arange(height, device=x.device)
    columns = left + torch.arange(width, device=x.device)
    columns = torch.where(flips.reshape(-1, 1).bool(), columns.flip(1), columns)
    image = torch.arange(len(padded), device=x.device).reshape(-1, 1, 1, 1)
    channel = torch.arange(channels, device=x.device).reshape(-1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]].reshape(x.shape)
