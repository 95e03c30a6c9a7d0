"""Predictions of images that are larger than what a model was trained on, window by window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError

OVERLAP = 0.25  # of neighbouring windows


def predict_in_windows(predict: Callable[[Tree], Tree], x: Tree, size: Sequence[int]) -> Tree:
    """The mean of what overlapping windows give, as MONAI's sliding_window_inference, also of stacked models (vmap).

    Args:
        predict: Images [rows, channels, *size] to outputs [rows, classes, *size].
        x: Images of any size; smaller ones are padded by 0.
        size: Of a window.

    Returns:
        Outputs, as large as the images.
    """
    if not isinstance(x, Tensor) or x.dim() != len(size) + 2:
        raise ConfigError(f"evaluation.window = {list(size)}: samples are no images of {len(size)} dimensions")
    space = x.shape[2:]
    missing = [max(0, w - n) for n, w in zip(space, size, strict=True)]
    if any(missing):
        ends = [n for m in reversed(missing) for n in (m // 2, m - m // 2)]
        whole: Any = predict_in_windows(predict, F.pad(x, ends), size)
        inner: Any = (..., *(slice(m // 2, m // 2 + n) for n, m in zip(space, missing, strict=True)))
        return whole[inner]
    total: Tensor | None = None
    covered = torch.zeros(space, dtype=x.dtype, device=x.device)
    for corner in product(*(_starts(n, w) for n, w in zip(space, size, strict=True))):
        at: Any = (..., *(slice(a, a + w) for a, w in zip(corner, size, strict=True)))
        part = predict(x[at])
        if not isinstance(part, Tensor) or tuple(part.shape[2:]) != tuple(size):
            raise ConfigError(f"evaluation.window = {list(size)}: outputs of a window must be as large as it is")
        if total is None:
            total = part.new_zeros(*part.shape[:2], *space)
        total[at] += part
        covered[at] += 1
    assert total is not None
    return total / covered


def _starts(length: int, window: int) -> list[int]:
    step = max(1, int(window * (1 - OVERLAP)))
    return [*range(0, length - window, step), length - window]
