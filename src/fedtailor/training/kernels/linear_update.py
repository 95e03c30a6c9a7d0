"""Large dense layers move by the two factors of their gradient, which itself is never made.

The gradient of a layer's weights is a product: cotangents of its outputs times its inputs, one row of each per sample.
As a matrix it is as large as the weights; to write it and to read it again is most of the work of a step on few
samples. Here the backward pass keeps the factors, for `weights.addmm_(cotangents.T, inputs, alpha=-lr)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.training.kernels.patching import replace_forwards

LEAST = 2**18  # entries of a layer: the gradient of a smaller one stays in the cache

Factors = list[tuple[str, Tensor, Tensor]]  # name of the weights, cotangents [n, outputs], inputs [n, inputs]


@contextmanager
def inside(module: nn.Module, trained: Collection[str]) -> Iterator[Factors]:
    """The list that a backward pass fills, in place of gradients for the weights of large layers."""
    factors: Factors = []
    layers = {f"{name}.weight": m for name, m in module.named_modules() if type(m) is nn.Linear}
    large = {k: m for k, m in layers.items() if k in trained and m.weight.numel() >= LEAST}

    def keep(name: str) -> Callable[[Tensor, Tensor], None]:
        return lambda cotangents, inputs: factors.append((name, cotangents, inputs))

    with replace_forwards({layer: partial(_forward, layer, keep(name)) for name, layer in large.items()}):
        yield factors


def _forward(layer: nn.Linear, keep: Callable[[Tensor, Tensor], None], x: Tensor) -> Tensor:
    output: Tensor = _Linear.apply(x, layer.weight, layer.bias, keep)
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.keep = keep
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        d, rows = d.reshape(-1, len(weight)), x.reshape(-1, weight.shape[1])
        if torch.is_grad_enabled():  # somebody differentiates in the forward pass
            return d.mm(weight).view_as(x), d.T.mm(rows), d.sum(0) if wants_bias else None, None
        ctx.keep(d, rows)
        return d.mm(weight).view_as(x) if wants_x else None, None, d.sum(0) if wants_bias else None, None
