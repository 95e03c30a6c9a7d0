"""The local training loop, as one differentiable operator that also runs for a stack of clients.

Everything the result depends on is an input, so a client can recompute it: the backward pass keeps no graph of the
forward pass but runs it again from the inputs. Under `torch.func.vmap` the batching rule receives the tensors of all
clients at once and takes each step for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.context import AfterStep
from fedtailor.core.model import Model
from fedtailor.core.random import seeded
from fedtailor.core.trees import Params, Tree, leaves, rebuild, tree_map
from fedtailor.training import compiling, optimizers
from fedtailor.training.arithmetic import LossScale, mean_loss, widen
from fedtailor.training.batches import Batch, PerSample, ahead, on_device, spans, with_places
from fedtailor.training.kernels import layout, selection, winograd
from fedtailor.training.specification import Training, wants


def train(training: Training, tensors: Tree) -> tuple[Params, Params, Tree]:
    """Run the operator on a tree of tensors; returns trained params, and buffers and memory after the last step."""
    training = replace(training, structure=tensors)
    out = _Train.apply(training, *leaves(tensors))
    return rebuild((tensors["params"], tensors["buffers"], tensors["memory"]), iter(out))


class _Train(torch.autograd.Function):
    @staticmethod
    def forward(training: Training, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.detach() for v in take_steps(training, [t.detach() for t in tensors], differentiable=False))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.training = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        tensors = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            out = take_steps(ctx.training, tensors, differentiable=True)
        pairs = [(o, c) for o, c in zip(out, cotangents, strict=True) if o.requires_grad]
        gradients = torch.autograd.grad(
            [o for o, _ in pairs],
            [t for t in tensors if t.requires_grad],
            [c for _, c in pairs],
            allow_unused=True,
        )
        each = iter(gradients)
        return None, *(next(each) if need else None for need in wanted)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], training: Training, *tensors: Tensor) -> Any:
        stack = [
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, in_dims[1:], strict=True)
        ]
        out = _Train.apply(replace(training, is_stacked=True), *stack)
        return out, tuple(0 for _ in out)


def take_steps(training: Training, tensors: Sequence[Tensor], *, differentiable: bool) -> list[Tensor]:
    """All steps; returns the leaves of (params, buffers, memory)."""
    t = rebuild(training.structure, iter(tensors))
    # clients in a stack cannot draw; alone, each training has its stream, again when it is recomputed
    with nullcontext() if training.is_stacked else seeded(*training.key, device=training.model.device):
        if not differentiable and (fast := selection.fast_path(training, t)) is not None:
            return _contiguous(leaves(fast(training, t)))
        if not selection.uses_channels_last(training, differentiable):
            return _general_path(training, t, differentiable)
        with winograd.inside(training.model.module):
            return _general_path(training, layout.channels_last_tree(t), differentiable)


def _general_path(training: Training, t: Tree, differentiable: bool) -> list[Tensor]:
    """Step by step, whatever the model and the optimizer are."""
    params: Params = {k: v.clone() for k, v in t["params"].items()}
    buffers: Params = {k: v.detach().clone() for k, v in t["buffers"].items()}
    kept = t["memory"]
    memory: dict[str, list[Tensor]] = {k: [] if kept is None else list(kept["memory"][k]) for k in params}
    count = None if kept is None else kept["count"]
    drawn = training.draw(training.is_stacked)
    factors = _lr_factors(training, drawn, t["lr"])
    ways = optimizers.by_parameter(training.solver, training.model.head, params)
    scaling = training.solver.arithmetic.scaling(t["lr"])
    drawn, starts = _warm_starts(training, drawn)
    device, home = training.model.device, training.data.home
    batches = on_device(drawn, device, home)
    with torch.set_grad_enabled(differentiable):
        loaded = ahead(batches, training.samples, is_apart=device != home)
        for number, (batch, samples) in enumerate(loaded, start=1):
            before = buffers
            if batch.active is not None or scaling is not None:
                buffers = {k: v.clone() for k, v in buffers.items()}
            of_part = partial(_gradient, training, params, buffers, t, starts, differentiable, scaling)
            gradient, counts = _accumulate(training, batch, samples, of_part)
            batch = batch if counts is None else _without_overflow(batch, counts)
            if t["center"] is not None:
                mu = t["mu"]
                pulled = {k: gradient[k] + widen(mu, c) * (params[k] - c) for k, c in t["center"].items()}
                gradient = gradient | pulled
            if training.solver.clip:
                gradient = _clip(gradient, training.solver.clip, training.is_stacked)
            lr = t["lr"] * factors[number - 1] if factors else t["lr"]
            if count is not None:
                count = count + (1 if batch.active is None else batch.active.to(count.dtype))
            for k, g in gradient.items():
                nth = number if count is None else widen(count, g).to(torch.float64)
                known = list(memory[k])
                way = ways[k]
                step = -widen(lr, g) * way.direction(way.options, params[k], g, memory[k], nth)
                step = step if way.factor == 1 else way.factor * step
                if known and batch.active is not None and not (kept is None and counts is None):
                    # who takes no step remembers none
                    memory[k] = [_where_active(batch.active, *pair) for pair in zip(memory[k], known, strict=True)]
                if t["mask"] is not None:
                    step = step * t["mask"][k]
                if batch.active is not None:
                    step = torch.where(widen(batch.active, step), step, torch.zeros_like(step))
                params[k] = params[k] + step if differentiable else params[k].detach().add_(step)
            if training.after_step is not None and params:
                params = _apply_after_step(training, training.after_step, params, batch)
            if batch.active is not None:
                buffers = {k: _where_active(batch.active, v, before[k]) for k, v in buffers.items()}
    after = None if kept is None else {"memory": memory, "count": count}
    return [v.contiguous() for v in leaves((params, buffers, after))]


def _apply_after_step(training: Training, after_step: AfterStep, params: Params, batch: Batch) -> Params:
    """What the caller makes of the parameters after a step, at each client that took it."""
    new = torch.func.vmap(after_step)(params) if training.is_stacked else after_step(params)
    if not isinstance(new, dict) or {k: v.shape for k, v in new.items()} != {k: v.shape for k, v in params.items()}:
        raise TypeError("me.sgd: after_step must return all parameters that it is given, in their shapes")
    if batch.active is None:
        return {k: new[k] for k in params}
    return {k: _where_active(batch.active, new[k], params[k]) for k in params}


def _accumulate(
    training: Training, batch: Batch, samples: tuple[Tree, Tensor], of_part: Callable[..., tuple[Params, Tensor | None]]
) -> tuple[Params, Tensor | None]:
    """The gradient of a step, and whether it counts: of one batch or, weighted by samples, the mean of several."""
    solver, whole = training.solver, samples[1].shape[int(training.is_stacked)]
    if solver.accumulate == 1:
        return of_part(batch, samples)
    total: Params = {}
    counts: Tensor | None = None
    for first, last in spans(whole, solver.batch_size, 2 if training.model.batch_statistics else 1):
        part = batch.part(first, last)
        at = (slice(None), slice(first, last)) if training.is_stacked else slice(first, last)
        gradient, finite = of_part(part, tree_map(lambda v, at=at: v[at], samples))
        share: Tensor = training.model.like.new_tensor((last - first) / whole)
        if part.weight is not None and batch.weight is not None:
            share = part.weight.sum(-1) / batch.weight.sum(-1).clamp(min=1)
        total = {k: widen(share, g) * g + (total[k] if total else 0) for k, g in gradient.items()}
        counts = finite if counts is None or finite is None else counts & finite
    return total, counts


def _warm_starts(training: Training, batches: Sequence[Batch]) -> tuple[Sequence[Batch], dict[str, PerSample]]:
    """Where the solves of an equilibrium ended, by sample: when it comes again, they begin there."""
    # another input, as of an augmented image, has another fixed point
    if not training.model.warm_starts or training.own_loss is not None or training.solver.augment or not batches:
        return batches, {}
    placed, places = with_places(batches)
    if places > sum(b.rows.numel() for b in batches):  # none comes again
        return batches, {}
    return placed, {k: PerSample(places, shape, training.model.like) for k, shape in training.model.warm_starts.items()}


def _gradient(
    training: Training,
    params: Params,
    buffers: Params,
    t: Tree,
    starts: dict[str, PerSample],
    differentiable: bool,
    scaling: LossScale | None,
    batch: Batch,
    samples: tuple[Tree, Tensor],
) -> tuple[Params, Tensor | None]:
    """The gradient, and whether it counts; None where it always does."""
    device, how = training.model.device, training.solver.arithmetic

    def loss(
        params: Params,
        buffers: Params,
        frozen: Params,
        start: Params,
        x: Tree,
        y: Tensor,
        weight: Tensor | None,
        index: Tensor | None,
    ) -> Tensor:
        tensors = params | buffers | frozen | start
        if training.own_loss is None:
            with how.cast(device):
                output = training.model(tensors, x, training=True)
            losses = training.loss(output.to(training.model.dtype) if how.is_lower else output, y)
        else:
            known = {"weight": y.new_ones(len(y), dtype=training.model.dtype) if weight is None else weight}
            known |= {} if index is None else {"index": index}
            with how.cast(device):
                losses = training.own_loss(tensors, x, y, **{name: known[name] for name in wants(training.own_loss)})
            losses = losses.to(training.model.dtype) if how.is_lower else losses
        if losses.shape != y.shape[:1]:  # a mean would count padding
            whose = "the task's loss" if training.own_loss is None else "me.sgd: loss"
            raise TypeError(
                f"{whose} must give one number per sample, here {len(y)}; it gave shape {list(losses.shape)}"
            )
        return mean_loss(losses, weight)

    if not params:
        return {}, None
    x, y = samples
    if selection.uses_channels_last(training, differentiable):
        x = layout.channels_last(x)
    start = {k: kept.read(batch) for k, kept in starts.items()}
    with torch.enable_grad():
        params = {k: v if v.requires_grad else v.detach().requires_grad_() for k, v in params.items()}
        # BatchNorm writes its statistics in place; those of a frozen part must not reach the caller
        frozen = {k: _frozen(training.model, k, v) for k, v in t["frozen"].items()}
        if how.compile and not differentiable and training.own_loss is None:
            args = training.model, training.loss, how, training.is_stacked, params | buffers | frozen | start
            total = compiling.batch_loss(*args, x, y, batch.weight)
        elif training.is_stacked:
            dims = (None if v is None else 0 for v in (batch.weight, batch.index))
            per_client = torch.func.vmap(loss, in_dims=(0, 0, 0, 0, 0, 0, *dims))
            total = per_client(params, buffers, frozen, start, x, y, batch.weight, batch.index)
        else:
            total = loss(params, buffers, frozen, start, x, y, batch.weight, batch.index)
        if scaling is not None:
            total = total * scaling.scale
        total = total.sum() if training.is_stacked else total
        for k, values in start.items():
            starts[k].write(batch, values)
        gradients = torch.autograd.grad(
            total, list(params.values()), create_graph=differentiable, materialize_grads=True
        )
    if scaling is None:
        return dict(zip(params, gradients, strict=True)), None
    own, counts = scaling.unscale(gradients)
    return dict(zip(params, own, strict=True)), counts


def _frozen(model: Model, name: str, value: Tensor) -> Tensor:
    """A frozen tensor for one step; what the model does not write need not be copied."""
    if name in model.trainable:
        return value
    value = value.detach()
    return value.clone() if name in model.params or name in model.private_buffers else value


def _lr_factors(training: Training, batches: Sequence[Batch], like: Tensor) -> list[Tensor]:
    """Of the step size in each step, by client if they are stacked; none if it is the same in all."""
    schedule = training.solver.schedule
    if schedule.is_constant or schedule.over == "rounds":
        return []
    if not training.is_stacked:
        return list(like.new_tensor([schedule.in_step(i, len(batches)) for i in range(len(batches))]).unbind())
    taken = torch.stack([b.rows.new_ones(len(b.rows)) if b.active is None else b.active.long() for b in batches])
    totals = taken.sum(0).tolist()
    return list(like.new_tensor([[schedule.in_step(i, n) for n in totals] for i in range(len(batches))]).unbind())


def _contiguous(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, one by one, so that never all of them are there twice."""
    for i, v in enumerate(tensors):
        tensors[i] = v.detach().contiguous()
    return tensors


def _where_active(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """What is new for clients that are active, what was there for the others."""
    return torch.where(widen(active, new), new, old)


def _without_overflow(batch: Batch, counts: Tensor) -> Batch:
    """The batch of a step that only those clients take whose gradients are finite."""
    return replace(batch, active=counts if batch.active is None else batch.active & counts)


def _clip(gradient: Params, limit: float, is_stacked: bool) -> Params:
    if not gradient:  # of a part without parameters
        return gradient
    squares = [
        g.flatten(int(is_stacked)).square().sum(-1) if g.dim() > int(is_stacked) else g.square()
        for g in gradient.values()
    ]
    norm = torch.stack(squares).sum(0).clamp(min=1e-30).sqrt()
    scale = (limit / norm).clamp(max=1)
    return {k: widen(scale, g) * g for k, g in gradient.items()}
