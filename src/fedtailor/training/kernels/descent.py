"""Plain SGD of one client, in place: what the general path does, without a new tensor for every step.

Large dense layers move by the two factors of their gradient, which itself is never made. The gradient of a layer's
weights is a product: cotangents of its outputs times its inputs, one row of each per sample. As a matrix it is as large
as the weights; to write it and to read it again is most of the work of a step on few samples. The backward pass keeps
the factors, for `weights.addmm_(cotangents.T, inputs, alpha=-lr)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.core.model import call_module
from fedtailor.core.trees import Params, Tree
from fedtailor.training.kernels import layout, output_buffers, winograd
from fedtailor.training.specification import Training


def descend(training: Training, t: Tree) -> tuple[Params, Params]:
    model = training.model
    is_last = model.likes_channels_last
    places = output_buffers.current()
    params: Params = {k: _copy(v, places.take_one(v), is_last).requires_grad_() for k, v in t["params"].items()}
    t = layout.channels_last_tree(t | {"params": {}}) if is_last else t
    buffers: Params = {k: v.clone() for k, v in t["buffers"].items()}
    frozen = {k: v if k in model.trainable else v.clone() for k, v in t["frozen"].items()}
    moving, lr, center = list(params.values()), float(t["lr"]), t["center"] or {}
    masks = None if t["mask"] is None else {k: t["mask"][k].to(v.dtype) for k, v in params.items()}
    with (
        torch.enable_grad(),
        winograd.inside(model.module) if is_last else nullcontext(),
        model.holding(params | buffers | frozen) as module,
        factored_updates(module, params if masks is None else ()) as kept,  # a mask needs the gradients themselves
    ):
        for batch in training.draw(False):
            x, y = training.samples(batch)
            total = training.loss(call_module(module, layout.channels_last(x) if is_last else x), y).mean()
            kept.clear()  # of a gradient that was taken inside the forward pass
            gradients = torch.autograd.grad(total, moving, allow_unused=True)
            computed = {k: g for k, g in zip(params, gradients, strict=True) if g is not None}
            moved = [params[k] for k in computed]
            with torch.no_grad():
                for k, c in center.items():
                    amount = lr * float(t["mu"])
                    params[k].lerp_(c, amount if masks is None else amount * masks[k])
                if masks is not None:
                    torch._foreach_addcmul_(moved, list(computed.values()), [masks[k] for k in computed], value=-lr)
                elif computed:
                    torch._foreach_add_(moved, list(computed.values()), alpha=-lr)
                for k, cotangents, inputs in kept:
                    params[k].addmm_(cotangents.T, inputs, alpha=-lr)
            del gradients, computed, total  # else they are there beside those of the next step
    return params, buffers


def _copy(value: Tensor, place: Tensor | None, is_last: bool) -> Tensor:
    """A copy in its place if it has one, laid out as convolutions like it."""
    if place is None:
        return layout.copy_channels_last(value) if is_last else value.clone()
    return (layout.as_channels_last(place) if is_last else place.detach()).copy_(value)


LEAST = 2**18  # entries of a layer: the gradient of a smaller one stays in the cache

Factors = list[tuple[str, Tensor, Tensor]]  # name of the weights, cotangents [n, outputs], inputs [n, inputs]


@contextmanager
def factored_updates(module: nn.Module, trained: Collection[str]) -> Iterator[Factors]:
    """The list that a backward pass fills, in place of gradients for the weights of large layers."""
    factors: Factors = []
    layers = {f"{name}.weight": m for name, m in module.named_modules() if type(m) is nn.Linear}
    large = {k: m for k, m in layers.items() if k in trained and m.weight.numel() >= LEAST}

    def keep(name: str) -> Callable[[Tensor, Tensor], None]:
        return lambda cotangents, inputs: factors.append((name, cotangents, inputs))

    with winograd.replace_forwards({layer: partial(_forward, layer, keep(name)) for name, layer in large.items()}):
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
