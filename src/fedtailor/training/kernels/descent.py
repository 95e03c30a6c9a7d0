"""Plain SGD of one client, in place: what the general path does, without a new tensor for every step."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fedtailor.core.model import call_module
from fedtailor.core.trees import Params, Tree
from fedtailor.training.kernels import layout, linear_update, output_buffers, winograd
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
        linear_update.inside(module, params if masks is None else ()) as kept,  # a mask needs the gradients themselves
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
