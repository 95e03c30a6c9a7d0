"""Equilibrium layers: z = g(z; x), its gradient, and the projection that makes g a contraction.

The solve is one operator with a batching rule of its own (as is the local training loop): it always sees plain tensors,
so that it can stop when all samples have converged, alone and for a stack of clients. A sample that has converged keeps
its value; what becomes of it does not depend on the others in its batch.

Anderson acceleration: Walker, Ni, SIAM J. Numer. Anal. 2011. Jacobian-free gradient: Fung et al., AAAI 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedtailor.errors import ConfigError, EquilibriumError
from fedtailor.numerics.solve_log import Report, log_solve

Map = Callable[..., Tensor]  # g(z, *tensors), pure: every tensor that it reads is among its arguments


@dataclass(frozen=True)
class Equilibrium:
    """How a fixed point is found, and how a gradient passes it.

    gradient: with J the Jacobian of g at the fixed point, a cotangent c of z reaches g as
    "jfb": c; "neumann-k": (1 + J' + ... + J'^(k-1)) c; "implicit": (1 - J')^-1 c, solved to the tolerance.
    Only "implicit" has exact derivatives of every order.
    """

    tolerance: float = 1e-3  # of |g(z) - z| / |g(z)|, for each sample
    max_iterations: int = 30
    history: int = 5  # steps that Anderson acceleration looks back on; 0 is the plain iteration
    beta: float = 1.0  # damping: the share of g(z) in the next z
    ridge: float = 1e-6  # of the least squares for the acceleration, relative to their size
    gradient: str = "jfb"
    strict: bool = False  # raise an error where a value is not finite
    dims: int = 1  # leading dimensions that count samples

    def __post_init__(self) -> None:
        if self.max_iterations < 1:
            raise EquilibriumError(f"max_iterations = {self.max_iterations}: an equilibrium needs at least 1")
        if not self.tolerance > 0:
            raise ConfigError(f"tolerance = {self.tolerance}: must be above 0")
        if not 0 < self.beta <= 1:
            raise ConfigError(f"beta = {self.beta}: must be above 0 and at most 1")
        if self.history < 0:
            raise ConfigError(f"history = {self.history}: must be 0 (plain iteration) or more")
        if self.gradient not in ("jfb", "implicit") and self.terms < 1:
            raise ConfigError(f'gradient = "{self.gradient}": must be "jfb", "neumann-k" (k = 1, 2, ...) or "implicit"')

    @property
    def terms(self) -> int:
        """Terms of the Neumann series that "jfb" and "neumann-k" keep."""
        if self.gradient == "jfb":
            return 1
        name, _, count = self.gradient.partition("-")
        return int(count) if name == "neumann" and count.isdecimal() else 0


def fixed_point(g: Map, start: Tensor, tensors: tuple[Tensor, ...], how: Equilibrium) -> tuple[Tensor, Report]:
    """The z with z = g(z, *tensors), found from `start`, and how that went. Gradients flow to `tensors`.

    Nothing of the iterations is kept for the backward pass: its memory is that of `how.terms` applications of g.
    Samples that do not converge have their last iterate; the report says so.
    """
    if torch.compiler.is_exporting():  # one graph without gradients: every iteration is in it
        z, report = solve(_at(g, *tensors), start, replace(how, strict=False))
        for _ in range(0 if how.gradient == "implicit" else how.terms):
            z = g(z, *tensors)
        return z, report
    if how.gradient == "implicit":
        z, *parts = _FixedPoint.apply(g, how, start.detach(), *tensors)
        return z, Report(*parts)
    z, *parts = _FixedPoint.apply(g, how, start.detach(), *(v.detach() for v in tensors))
    for _ in range(how.terms):  # at a fixed point the derivative of k steps is the sum of the first k terms
        z = g(z, *tensors)
    return z, Report(*parts)


def solve(step: Callable[[Tensor], Tensor], start: Tensor, how: Equilibrium) -> tuple[Tensor, Report]:
    """Iterate z <- step(z), accelerated, until every sample has converged or the budget is spent."""
    z, samples = start, start.shape[: how.dims]
    is_graph = torch.compiler.is_exporting()
    accelerate = _AndersonInGraph(how, start) if is_graph else _Anderson(how, start)
    residual = start.new_full(samples, torch.inf)
    iterations = torch.zeros(samples, dtype=torch.long, device=start.device)
    active = torch.ones(samples, dtype=torch.bool, device=start.device)
    left = finite = residual.numel()
    for k in range(how.max_iterations):
        new = step(z)
        f = (new - z).flatten(how.dims)
        size = torch.linalg.vector_norm(new.flatten(how.dims), dim=-1)
        relative = torch.linalg.vector_norm(f, dim=-1) / size.clamp(min=torch.finfo(size.dtype).tiny)
        residual = torch.where(active, relative, residual)
        iterations += active
        # what is not a number will not become one again
        stops = active & ((relative <= how.tolerance) | ~torch.isfinite(relative))
        goes_on = active & ~stops
        is_last = k + 1 == how.max_iterations
        if not is_graph and (how.strict or not is_last):  # the only numbers that are read off the device
            left, finite = torch.stack([goes_on.sum(), torch.isfinite(residual).sum()]).tolist()
        if is_last or (not is_graph and not left):
            z = torch.where(_wide(active, z), new, z)
            break
        z_next = accelerate(z, f)
        if is_graph or left < goes_on.numel():  # else the masks would change nothing
            z_next = torch.where(_wide(goes_on, z), z_next, torch.where(_wide(stops, z), new, z))
        z, active = z_next, goes_on
    report = Report(residual, iterations, residual <= how.tolerance)
    if is_graph:
        return z, report
    log_solve(report)
    if how.strict and finite < residual.numel():
        raise EquilibriumError(
            f"the equilibrium of {residual.numel() - finite} of {residual.numel()} samples is not a "
            "finite number; look for values that are not in the data, lower local.lr or set model.project = true"
        )
    return z, report


class _Anderson:
    """The next iterate from the last ones, with the least residual that a combination of them is expected to have.

    Differences of residuals (`df`) and the moves they belong to, in a ring of `history` slots; empty slots are zeros,
    to which the ridge gives no weight.
    """

    def __init__(self, how: Equilibrium, start: Tensor) -> None:
        self.how = how
        rows = start.flatten(how.dims)
        self.m = min(how.history, rows.shape[-1])
        self.df = rows.new_zeros(*rows.shape[:-1], self.m, rows.shape[-1])
        self.move = torch.zeros_like(self.df)
        self.gram = rows.new_zeros(*rows.shape[:-1], self.m, self.m)
        self.last: tuple[Tensor, Tensor] | None = None
        self.count = 0

    def __call__(self, z: Tensor, f: Tensor) -> Tensor:
        rows = z.flatten(self.how.dims)
        plain = rows + self.how.beta * f
        if not self.m:
            return plain.reshape(z.shape)
        if self.last is None:
            self.last = rows, f
            return plain.reshape(z.shape)
        slot = self.count % self.m
        self.count += 1
        df = f - self.last[1]
        self.df[..., slot, :] = df
        self.move[..., slot, :] = rows - self.last[0] + self.how.beta * df
        products = torch.stack([df, f], dim=-2) @ self.df.mT
        self.gram[..., slot, :] = self.gram[..., :, slot] = products[..., 0, :]
        scale = self.gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=torch.finfo(f.dtype).tiny)
        ridge = torch.eye(self.m, dtype=f.dtype, device=f.device) * (self.how.ridge * scale)[..., None, None]
        gamma = torch.linalg.solve_ex(self.gram + ridge, products[..., 1, :, None]).result
        self.last = rows, f
        return (plain - (gamma.mT @ self.move)[..., 0, :]).reshape(z.shape)


class _AndersonInGraph:
    """The same for a graph that is exported: few nodes, and no operator that other programs lack."""

    def __init__(self, how: Equilibrium, start: Tensor) -> None:
        self.how, self.m = how, min(how.history, start.flatten(how.dims).shape[-1])
        self.df: list[Tensor] = []
        self.move: list[Tensor] = []
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, z: Tensor, f: Tensor) -> Tensor:
        rows = z.flatten(self.how.dims)
        plain = rows + self.how.beta * f
        if self.last is not None and self.m:
            df = f - self.last[1]
            self.df = [*self.df, df[..., None, :]][-self.m :]
            self.move = [*self.move, (rows - self.last[0] + self.how.beta * df)[..., None, :]][-self.m :]
            differences = torch.cat(self.df, dim=-2)
            gram, eye = differences @ differences.mT, torch.eye(len(self.df), dtype=f.dtype, device=f.device)
            scale = (gram * eye).sum((-2, -1), keepdim=True).clamp(min=torch.finfo(f.dtype).tiny)
            gamma = _eliminated(gram + self.how.ridge * scale * eye, differences @ f[..., None], eye)
            plain = plain - (gamma.mT @ torch.cat(self.move, dim=-2))[..., 0, :]
        self.last = rows, f
        return plain.reshape(z.shape)


def _eliminated(matrix: Tensor, right: Tensor, eye: Tensor) -> Tensor:
    """The solution of small positive definite systems in sums and products."""
    both = torch.cat([matrix, right], dim=-1)
    for i in range(len(eye)):
        pivot = both[..., i : i + 1, :] / both[..., i : i + 1, i : i + 1]
        both = both - (both[..., :, i : i + 1] - eye[:, i : i + 1]) * pivot
    return both[..., -1:]


class _FixedPoint(torch.autograd.Function):
    """z, residual, iterations, converged of g(z, *tensors). The gradient is the implicit one."""

    @staticmethod
    def forward(g: Map, how: Equilibrium, start: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            z, report = solve(_at(g, *tensors), start, how)
        return z.clone(), *report

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.g, ctx.how = inputs[:2]
        ctx.save_for_backward(output[0], *inputs[3:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Tensor) -> Any:
        z, *tensors = ctx.saved_tensors
        # u = J'u + c is a fixed point as well: solved by the same operator, it has derivatives in turn
        u = _FixedPoint.apply(_Adjoint(ctx.g), ctx.how, cotangent, cotangent, z, *tensors)[0]
        needed = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]

        def of_needed(*values: Tensor) -> Tensor:
            filled = list(tensors)
            for i, value in zip(needed, values, strict=True):
                filled[i] = value
            return ctx.g(z, *filled)

        gradients: list[Tensor | None] = [None] * len(tensors)
        for i, gradient in zip(needed, _vjp(of_needed, u, *(tensors[i] for i in needed)), strict=True):
            gradients[i] = gradient
        return None, None, None, *gradients

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], g: Map, how: Equilibrium, *tensors: Tensor) -> Any:
        stack = [
            v.expand(info.batch_size, *v.shape) if d is None else v.movedim(d, 0)
            for v, d in zip(tensors, in_dims[2:], strict=True)
        ]
        out = _FixedPoint.apply(_stacked(g), replace(how, dims=how.dims + 1), *stack)
        return out, tuple(0 for _ in out)


@dataclass(frozen=True)
class _Adjoint:
    """u -> J'u + c, where J is the Jacobian of g with respect to z."""

    g: Map

    def __call__(self, u: Tensor, c: Tensor, z: Tensor, *tensors: Tensor) -> Tensor:
        return _vjp(lambda z: self.g(z, *tensors), u, z)[0] + c

    def at(self, c: Tensor, z: Tensor, *tensors: Tensor) -> Callable[[Tensor], Tensor]:
        """The same with everything but u held fixed: g is evaluated once for all iterations."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            out = self.g(z, *(v.detach() for v in tensors))
        return lambda u: torch.autograd.grad(out, z, u, retain_graph=True)[0] + c


def _at(g: Map, *tensors: Tensor) -> Callable[[Tensor], Tensor]:
    return g.at(*tensors) if isinstance(g, _Adjoint) else lambda z: g(z, *tensors)


def _stacked(g: Map) -> Map:
    """g for a stack of clients; no client's output depends on another, so the adjoint of a stack is a stack."""
    return _Adjoint(_stacked(g.g)) if isinstance(g, _Adjoint) else torch.func.vmap(g)


def _vjp(function: Callable[..., Tensor], cotangent: Tensor, *at: Tensor) -> tuple[Tensor, ...]:
    if not at:
        return ()
    return torch.func.vjp(function, *at)[1](cotangent)


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(mask.shape + (1,) * (like.dim() - mask.dim()))


def rows_in_l1_ball(matrix: Tensor, radius: float) -> Tensor:
    """The nearest matrix whose rows have absolute sums of at most `radius`: its infinity norm is then at most that.

    Exact (Duchi et al., ICML 2008): within a row every entry moves towards 0 by the same amount, and those that would
    pass it are 0. With a radius below 1 and an activation of slope at most 1 (softplus, tanh, ReLU), phi(Bz + Cx + b)
    is a contraction in z. Differentiable almost everywhere.
    """
    sizes = matrix.abs()
    shift = _Shift.apply(sizes.detach(), radius)
    outside, stays = shift > 0, sizes > shift
    # the shift again, from the entries that stay: now with its derivative
    move = ((sizes * stays).sum(-1, keepdim=True) - radius) / stays.sum(-1, keepdim=True).clamp(min=1)
    moved = torch.where(stays, matrix - torch.sign(matrix) * move, torch.zeros_like(matrix))
    return torch.where(outside, moved, matrix)


class _Shift(torch.autograd.Function):
    """By how much the entries of each row have to move; 0 for rows inside the ball, which are not sorted."""

    @staticmethod
    def forward(sizes: Tensor, radius: float) -> Tensor:
        shift = sizes.new_zeros(*sizes.shape[:-1], 1)
        outside = sizes.sum(-1) > radius
        # to find those outside, the host would have to wait
        if sizes.device.type != "cpu" or torch.compiler.is_exporting():
            return torch.where(outside[..., None], _Shift._of(sizes, radius), shift)
        shift[outside] = _Shift._of(sizes[outside], radius)
        return shift

    @staticmethod
    def _of(sizes: Tensor, radius: float) -> Tensor:
        falling = sizes.sort(dim=-1, descending=True).values
        excess = falling.cumsum(-1) - radius
        count = torch.arange(1, sizes.shape[-1] + 1, dtype=sizes.dtype, device=sizes.device)
        stay = (falling * count > excess).sum(-1, keepdim=True)
        return excess.gather(-1, (stay - 1).clamp(min=0)) / stay

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], sizes: Tensor, radius: float) -> Any:
        return _Shift.apply(sizes.movedim(in_dims[0] or 0, 0), radius), 0
