"""The local training loop, as one differentiable operator that also runs for a stack of clients.

Everything the result depends on is an input, so a client can recompute it: the backward pass keeps no graph of the
forward pass but runs it again from the inputs. Under `torch.func.vmap` the batching rule receives the tensors of all
clients at once and takes each step for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, leaves, rebuild, tree_map
from fedtailor.local import dense, factors, winograd
from fedtailor.local.augment import augment
from fedtailor.local.batches import Batch, PerSample

AT_ONCE = 256  # samples of a pass without gradient


@dataclass(frozen=True)
class Solver:
    """How a client takes its local steps."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # largest norm of a step's gradient; 0 is no limit
    batch_size: int = 32  # 0 is the whole data
    augment: Literal["crop-flip"] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a client's move is minus its step size times the sum of its gradients."""
        return self.optimizer == "sgd" and not (self.momentum or self.weight_decay or self.clip)


@dataclass(frozen=True)
class Training:
    """What is fixed before the first step. The tensors that a gradient may flow to travel beside it, as a tree:

    params, buffers, frozen: the parts of the model; only params are trained.
    center, mu: adds the gradient mu (params - center) of a proximal term, for the entries of center; or both None.
    mask: 0 where a parameter must stay as it is; None without one.
    lr: step size, possibly one per client.
    """

    model: Model
    loss: Callable[[Tensor, Tensor], Tensor]
    solver: Solver
    x: Tensor
    y: Tensor
    draw: Callable[[bool], Sequence[Batch]]  # the batches of one client (False) or of the stack (True)
    structure: Tree  # shaped as the tree of tensors
    is_stacked: bool = False
    own_loss: Callable[[Params, Tensor, Tensor], Tensor] | None = None  # of (tensors, x, y), in place of model and loss

    def run(self, tensors: Sequence[Tensor], *, differentiable: bool) -> list[Tensor]:
        """All steps; returns the leaves of (params, buffers)."""
        t = rebuild(self.structure, iter(tensors))
        if not differentiable and (layers := self._dense_layers(t)):
            return leaves((self._trained_dense(layers, t), t["buffers"]))
        if differentiable or self.is_stacked:
            return self._stepped(t, differentiable)
        t = self._laid_out(t)
        with winograd.inside(self.model.module) if self._convolves_by_hand() else nullcontext():
            if (head := self._head_alone(t)) is not None:
                return leaves((self._trained_head(head, t), t["buffers"]))
            if self._is_plain(t):
                return [v.detach().contiguous() for v in leaves(self._descended(t))]
            return self._stepped(t, differentiable)

    def _stepped(self, t: Tree, differentiable: bool) -> list[Tensor]:
        """What `run` does, whatever the model and the optimizer are."""
        params: Params = {k: v.clone() for k, v in t["params"].items()}
        buffers: Params = {k: v.detach().clone() for k, v in t["buffers"].items()}
        memory: dict[str, list[Tensor]] = {k: [] for k in params}
        batches = self.draw(self.is_stacked)
        starts = self._starts(batches)
        with torch.set_grad_enabled(differentiable):
            for number, batch in enumerate(batches, start=1):
                before = buffers
                if batch.active is not None:
                    buffers = {k: v.clone() for k, v in buffers.items()}
                gradient = self._gradient(params, buffers, t, batch, starts, differentiable)
                if t["center"] is not None:
                    mu = t["mu"]
                    pulled = {k: gradient[k] + _wide(mu, c) * (params[k] - c) for k, c in t["center"].items()}
                    gradient = gradient | pulled
                if self.solver.clip:
                    gradient = _clipped(gradient, self.solver.clip, self.is_stacked)
                for k, g in gradient.items():
                    step = -_wide(t["lr"], g) * self._direction(params[k], g, memory[k], number)
                    if t["mask"] is not None:
                        step = step * t["mask"][k]
                    if batch.active is not None:
                        step = torch.where(_wide(batch.active, step), step, torch.zeros_like(step))
                    params[k] = params[k] + step if differentiable else params[k].detach().add_(step)
                if batch.active is not None:
                    buffers = {k: torch.where(_wide(batch.active, v), v, before[k]) for k, v in buffers.items()}
        return [v.contiguous() for v in leaves((params, buffers))]

    def _convolves_by_hand(self) -> bool:
        # its many small products do not gain from a second thread
        return self.model.likes_channels_last and torch.get_num_threads() == 1

    def _laid_out(self, t: Tree) -> Tree:
        """The same tensors, in memory as convolutions like them."""
        if not self.model.likes_channels_last:
            return t
        parts = [k for k in ("params", "frozen", "center", "mask") if t[k] is not None]
        return t | {part: {k: _channels_last(v) for k, v in t[part].items()} for part in parts}

    def _is_plain(self, t: Tree) -> bool:
        return bool(t["params"]) and self.solver.is_plain and self.own_loss is None and not self.model.warm_starts

    def _descended(self, t: Tree) -> tuple[Params, Params]:
        """Plain SGD of one client, in place: what the general path does, without a new tensor for every step."""
        params: Params = {k: v.clone().requires_grad_() for k, v in t["params"].items()}
        buffers: Params = {k: v.clone() for k, v in t["buffers"].items()}
        frozen = {k: v if k in self.model.trainable else v.clone() for k, v in t["frozen"].items()}
        trained, lr, center = list(params.values()), float(t["lr"]), t["center"] or {}
        masks = None if t["mask"] is None else {k: t["mask"][k].to(v.dtype) for k, v in params.items()}
        with (
            torch.enable_grad(),
            self.model.holding(params | buffers | frozen) as module,
            factors.inside(module, params if masks is None else ()) as kept,  # a mask needs the gradients themselves
        ):
            for batch in self.draw(False):
                x, y = self._samples(batch)
                total = self.loss(module(_channels_last(x) if self.model.likes_channels_last else x), y).mean()
                kept.clear()  # of a gradient that was taken inside the forward pass
                gradients = torch.autograd.grad(total, trained, allow_unused=True)
                made = {k: g for k, g in zip(params, gradients, strict=True) if g is not None}
                moved = [params[k] for k in made]
                with torch.no_grad():
                    for k, c in center.items():
                        amount = lr * float(t["mu"])
                        params[k].lerp_(c, amount if masks is None else amount * masks[k])
                    if masks is not None:
                        torch._foreach_addcmul_(moved, list(made.values()), [masks[k] for k in made], value=-lr)
                    elif made:
                        torch._foreach_add_(moved, list(made.values()), alpha=-lr)
                    for k, cotangents, inputs in kept:
                        params[k].addmm_(cotangents.T, inputs, alpha=-lr)
        return params, buffers

    def _samples(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, y = _rows(self.x, batch.rows), _rows(self.y, batch.rows)
        return (x if batch.drawn is None else augment(x, batch.drawn[..., :2], batch.drawn[..., 2])), y

    def _head_alone(self, t: Tree) -> dense.Layer | None:
        """The last layer, if it is all that is trained, and by steps that can do without autograd."""
        head = dense.head_of(self.model)
        if head is None or set(t["params"]) != {head.weight, head.bias} or self._is_special(t):
            return None
        return head

    def _trained_head(self, head: dense.Layer, t: Tree) -> Params:
        """What comes before the head is the same in every step: it is computed once for each sample."""
        batches = self.draw(False)
        rows = torch.cat([self.x.new_zeros(0, dtype=torch.int64), *(b.rows for b in batches)]).unique()
        with torch.no_grad(), self.model.holding(t["frozen"] | t["params"]) as module:
            compute: Callable[[Tensor], Tensor] = module.before_head  # type: ignore[assignment]
            parts = (compute(_channels_last(_rows(self.x, some))) for some in rows.split(AT_ONCE))
            before = torch.cat([self.x.new_zeros(0, t["params"][head.weight].shape[1]), *parts])
        mine = [Batch(torch.searchsorted(rows, batch.rows)[None]) for batch in batches]
        return self._by_hand([head], t | {"frozen": {}}, before, _rows(self.y, rows), mine)

    def _dense_layers(self, t: Tree) -> tuple[dense.Layer, ...]:
        """The layers, if these steps can do without autograd."""
        return () if self._is_special(t) or not t["params"] else dense.layers_of(self.model)

    def _is_special(self, t: Tree) -> bool:
        """Whether steps are others than `dense` knows."""
        is_usual = self.own_loss is None and not self.solver.augment and self.solver.is_plain and not t["buffers"]
        return not is_usual or self.loss not in dense.GRADIENTS

    def _trained_dense(self, layers: Sequence[dense.Layer], t: Tree) -> Params:
        batches = self.draw(self.is_stacked)
        if self.is_stacked:
            return dense.train(layers, dense.GRADIENTS[self.loss], t, self.x, self.y, batches)
        alone = [replace(batch, rows=batch.rows[None]) for batch in batches]
        return self._by_hand(layers, t, self.x, self.y, alone)

    def _by_hand(self, layers: Sequence[dense.Layer], t: Tree, x: Tensor, y: Tensor, batches: list[Batch]) -> Params:
        """A stack of one client."""
        one = tree_map(lambda v: v[None], t)
        trained = dense.train(layers, dense.GRADIENTS[self.loss], one, x, y, batches)
        return {k: v[0] for k, v in trained.items()}

    def _starts(self, batches: Sequence[Batch]) -> dict[str, PerSample]:
        """Where the solves of an equilibrium ended, by sample: when it comes again, they begin there."""
        # another input, as of an augmented image, has another fixed point
        if not self.model.warm_starts or self.own_loss is not None or self.solver.augment or not batches:
            return {}
        rows = torch.cat([b.rows.flatten() for b in batches])
        if len(rows.unique()) == len(rows):  # none comes again
            return {}
        return {k: PerSample(rows, shape, self.model.dtype) for k, shape in self.model.warm_starts.items()}

    def _gradient(
        self,
        params: Params,
        buffers: Params,
        t: Tree,
        batch: Batch,
        starts: dict[str, PerSample],
        differentiable: bool,
    ) -> Params:
        def loss(
            params: Params, buffers: Params, frozen: Params, start: Params, x: Tensor, y: Tensor, weight: Tensor | None
        ) -> Tensor:
            tensors = params | buffers | frozen | start
            if self.own_loss is None:
                losses = self.loss(self.model(tensors, x, training=True), y)
            else:
                losses = self.own_loss(tensors, x, y)
            return losses.mean() if weight is None else (losses * weight).sum() / weight.sum().clamp(min=1)

        if not params:
            return {}
        x, y = self._samples(batch)
        if self.model.likes_channels_last and not (differentiable or self.is_stacked):
            x = _channels_last(x)
        start = {k: kept.read(batch) for k, kept in starts.items()}
        with torch.enable_grad():
            params = {k: v if v.requires_grad else v.detach().requires_grad_() for k, v in params.items()}
            # BatchNorm writes its statistics in place; those of a frozen part must not reach the caller
            frozen = {k: v if k in self.model.trainable else v.detach().clone() for k, v in t["frozen"].items()}
            if self.is_stacked:
                per_client = torch.func.vmap(loss, in_dims=(0, 0, 0, 0, 0, 0, None if batch.weight is None else 0))
                total = per_client(params, buffers, frozen, start, x, y, batch.weight).sum()
            else:
                total = loss(params, buffers, frozen, start, x, y, batch.weight)
            for k, values in start.items():
                starts[k].write(batch, values)
            gradients = torch.autograd.grad(
                total, list(params.values()), create_graph=differentiable, materialize_grads=True
            )
        return dict(zip(params, gradients, strict=True))

    def _direction(self, param: Tensor, gradient: Tensor, memory: list[Tensor], number: int) -> Tensor:
        """The step before it is scaled by the step size; `memory` holds the optimizer's averages."""
        s = self.solver
        if s.weight_decay:
            gradient = gradient + s.weight_decay * param
        if s.optimizer == "adam":
            first, second = memory or (torch.zeros_like(gradient), torch.zeros_like(gradient))
            memory[:] = [0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()]
            first, second = memory[0] / (1 - 0.9**number), memory[1] / (1 - 0.999**number)
            # inside the root, so that the derivative of a step exists where the gradient is 0
            return first / (second + 1e-16).sqrt()
        if s.momentum:
            memory[:] = [s.momentum * memory[0] + gradient if memory else gradient]
            return memory[0]
        return gradient


def train(training: Training, tensors: Tree) -> tuple[Params, Params]:
    """Run the operator on a tree of tensors; returns trained params and the buffers after the last step."""
    training = replace(training, structure=tensors)
    out = _Train.apply(training, *leaves(tensors))
    return rebuild((tensors["params"], tensors["buffers"]), iter(out))


class _Train(torch.autograd.Function):
    @staticmethod
    def forward(training: Training, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.detach() for v in training.run([t.detach() for t in tensors], differentiable=False))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.training = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        tensors = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad():
            out = ctx.training.run(tensors, differentiable=True)
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


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *values.shape[1:])  # faster than values[rows]


def _channels_last(value: Tensor) -> Tensor:
    # not `contiguous`, which leaves the strides of a single channel as they are, and these decide on the kernel
    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


def _wide(value: Tensor, like: Tensor) -> Tensor:
    """One value, or one per client, made to broadcast against a tensor."""
    return value.reshape(value.shape + (1,) * (like.dim() - value.dim()))


def _clipped(gradient: Params, limit: float, is_stacked: bool) -> Params:
    if not gradient:  # of a part without parameters
        return gradient
    squares = [
        g.flatten(int(is_stacked)).square().sum(-1) if g.dim() > int(is_stacked) else g.square()
        for g in gradient.values()
    ]
    norm = torch.stack(squares).sum(0).clamp(min=1e-30).sqrt()
    scale = (limit / norm).clamp(max=1)
    return {k: _wide(scale, g) * g for k, g in gradient.items()}
