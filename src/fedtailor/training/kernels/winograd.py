"""Convolutions with fewer products (Winograd 1980; Lavin and Gray, CVPR 2016), forward and backward.

An image is cut into tiles that overlap. In each of the two directions, a tile of inputs and the kernel are evaluated,
as polynomials, at as many points as the tile is wide; values at a point are multiplied, and outputs are read off the
products. A tile of 8x8 with a kernel of 5x5 has 16 outputs: 64 products for each pair of channels in place of 400.
Rounding errors are about ten times those of the direct way: with float32 3e-6 of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

STEP = 4  # outputs of a tile, in each direction
POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)  # and infinity; a kernel of 3 needs the first five
MOST_WEIGHTS = 2**18  # their transform is several times as large, and would be most of the memory of a step
LEAST_WEIGHTS = 2**15  # with fewer the transforms cost more than is saved
PRECISE = (torch.float32, torch.float64)  # enough for the transforms
MOST_IN_VAIN = 1.5  # outputs computed over outputs wanted, where tiles go beyond the image


class Transforms(NamedTuple):
    """Along one direction: outputs = out @ ((kernel @ weights) * (tile @ inputs))."""

    out: Tensor
    kernel: Tensor
    tile: Tensor


@lru_cache
def transforms(size: int, dtype: torch.dtype) -> Transforms:
    """For a kernel of so many entries."""
    points = np.array(POINTS[: STEP + size - 2])

    def values(count: int) -> Any:
        """Of the powers below `count` at each point; at infinity the highest alone counts."""
        return np.vstack([np.vander(points, count, increasing=True), np.eye(count)[-1]])

    # the rows are Lagrange's polynomials of the points, and the one that is 0 at all of them
    rest = [np.delete(points, i) for i in range(len(points))]
    lagrange = [np.poly(others)[::-1] / np.prod(p - others) for p, others in zip(points, rest, strict=True)]
    tile = np.vstack([*(np.append(row, 0) for row in lagrange), np.poly(points)[::-1]])
    return Transforms(
        *(torch.tensor(m, dtype=dtype, device="cpu") for m in (values(STEP).T.copy(), values(size), tile))
    )


def along_both(matrix: Tensor, values: Tensor) -> Tensor:
    """Apply a matrix to the first two directions, [a, a, ...] to [b, b, ...]."""
    b, a = matrix.shape
    first = matrix.mm(values.reshape(a, -1)).view(b, a, -1)
    return torch.bmm(matrix.expand(b, b, a), first).view(b, b, *values.shape[2:])


class _Convolve(torch.autograd.Function):
    """[n, h, w, c] with weights [o, c, k, k] to [n, h - k + 1, w - k + 1, o]; these are multiples of a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        n, _, _, c = x.shape
        o, k = len(weight), weight.shape[-1]
        matrix = transforms(k, x.dtype)
        width = STEP + k - 1
        windows = x.unfold(1, width, STEP).unfold(2, width, STEP)  # [n, rows, columns, c, width, width]
        _, rows, columns = windows.shape[:3]
        v = along_both(matrix.tile, windows.permute(4, 5, 0, 1, 2, 3)).view(width * width, -1, c)
        u = along_both(matrix.kernel, weight.permute(2, 3, 0, 1)).view(width * width, o, c)
        y = along_both(matrix.out, torch.bmm(v, u.mT).view(width, width, n, rows, columns, o))
        ctx.save_for_backward(v, u, x, weight)
        out = y.permute(2, 3, 0, 4, 1, 5).reshape(n, rows * STEP, columns * STEP, o)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        v, u, x, weight = ctx.saved_tensors
        (n, h, w, c), k = x.shape, weight.shape[-1]
        if torch.is_grad_enabled():  # it will be differentiated again
            images, wanted = x.permute(0, 3, 1, 2), d.permute(0, 3, 1, 2)
            dx = conv2d_input(images.shape, weight, wanted).permute(0, 2, 3, 1)
            return (
                dx,
                conv2d_weight(images, weight.shape, wanted),
                d.sum((0, 1, 2)) if ctx.needs_input_grad[2] else None,
            )
        matrix, o, width = transforms(k, d.dtype), d.shape[-1], STEP + k - 1
        rows, columns = d.shape[1] // STEP, d.shape[2] // STEP
        dx = dw = db = None
        tiles = d.reshape(n, rows, STEP, columns, STEP, o).permute(2, 4, 0, 1, 3, 5)
        m = along_both(matrix.out.mT, tiles).view(width * width, -1, o)
        if ctx.needs_input_grad[1]:
            dw = along_both(matrix.kernel.mT, torch.bmm(m.mT, v).view(width, width, o, c)).permute(2, 3, 0, 1)
            dw = dw.contiguous(memory_format=torch.channels_last)
        if ctx.needs_input_grad[0]:
            parts = along_both(matrix.tile.mT, torch.bmm(m, u).view(width, width, n, rows, columns, c))
            dx = d.new_zeros(n, rows + 1, STEP, columns + 1, STEP, c)  # what overlaps is added
            for i, some in ((0, slice(STEP)), (1, slice(STEP, width))):
                for j, others in ((0, slice(STEP)), (1, slice(STEP, width))):
                    part = parts[some, others].permute(2, 3, 0, 4, 1, 5)
                    dx[:, i : i + rows, : part.shape[2], j : j + columns, : part.shape[4]].add_(part)
            dx = dx.view(n, (rows + 1) * STEP, (columns + 1) * STEP, c)[:, :h, :w]
        if ctx.needs_input_grad[2]:
            db = d.sum((0, 1, 2))
        return dx, dw, db


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """What F.conv2d computes with a step of one, for kernels of 3x3 and 5x5."""
    (up, left), (height, width) = padding, _outputs(x, weight, padding)
    down, right = up + -height % STEP, left + -width % STEP
    x = x.permute(0, 2, 3, 1)
    if up or left or down or right:
        x = F.pad(x, (0, 0, left, right, up, down))
    return _Convolve.apply(x, weight, bias)[:, :height, :width].permute(0, 3, 1, 2)


@contextmanager
def inside(module: nn.Module) -> Iterator[None]:
    """Convolutions of the module that gain from it are computed so."""
    layers = [m for m in module.modules() if type(m) is nn.Conv2d and _has_right_form(m)]
    with replace_forwards({layer: partial(_forward, layer) for layer in layers}):
        yield


def _forward(layer: nn.Conv2d, x: Tensor) -> Tensor:
    padding: Any = layer.padding
    height, width = _outputs(x, layer.weight, padding)
    computed = (height + -height % STEP) * (width + -width % STEP)
    gains = min(height, width) > 0 and computed <= MOST_IN_VAIN * height * width and x.device.type == "cpu"
    fits = x.dim() == 4 and x.shape[1] == layer.in_channels and x.dtype == layer.weight.dtype in PRECISE
    if not (gains and fits):
        return nn.Conv2d.forward(layer, x)
    return convolve(x, layer.weight, layer.bias, padding)


def _has_right_form(layer: nn.Conv2d) -> bool:
    is_simple = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
    # of 3x3, torch's own are faster with the channels last: by a tenth (128 channels) to a third (64)
    fits = layer.kernel_size == (5, 5) and not isinstance(layer.padding, str)
    return is_simple and fits and LEAST_WEIGHTS <= layer.weight.numel() <= MOST_WEIGHTS


def _outputs(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> tuple[int, int]:
    lost = weight.shape[-1] - 1
    return x.shape[-2] + 2 * padding[0] - lost, x.shape[-1] + 2 * padding[1] - lost


@contextmanager
def replace_forwards(forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Inside, these layers are computed so, but not within torch.func's transforms, which know only torch's own ways.
    A layer that somebody else has changed stays as it is.
    """
    mine = {layer: forward for layer, forward in forwards.items() if "forward" not in vars(layer)}
    for layer, forward in mine.items():
        layer.forward = partial(_unless_transformed, layer, forward)
    try:
        yield
    finally:
        for layer in mine:
            del layer.forward


def _unless_transformed(layer: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    output: Tensor = type(layer).forward(layer, x) if is_transformed else forward(x)
    return output
