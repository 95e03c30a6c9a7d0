"""Local optimizers: from a gradient to the direction of a step, before it is scaled by the step size.

Each is a function of the parameter, its gradient, what it remembers of earlier steps (empty at first) and the number of
the step; differentiable, so that a tape goes through it. Add one here, name your own as "module:function", or a class
of torch as "torch.optim.RMSprop". With `local.keep_state` the memory begins as zeros and the number is a tensor:
clients of a stack may have taken part in other rounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtailor.core.model import is_under
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError, nearest
from fedtailor.plugins import import_object
from fedtailor.training.specification import PartOptions, SolverOptions

Memory = list[Tensor]  # is written to
Number = int | Tensor
Optimizer = Callable[[SolverOptions, Tensor, Tensor, Memory, Number], Tensor]


def sgd(s: SolverOptions, param: Tensor, gradient: Tensor, memory: Memory, number: Number) -> Tensor:
    """Plain, or with momentum."""
    gradient = _add_decay(s, param, gradient)
    if not s.momentum:
        return gradient
    memory[:] = [s.momentum * memory[0] + gradient if memory else gradient]
    return memory[0]


def nesterov(s: SolverOptions, param: Tensor, gradient: Tensor, memory: Memory, number: Number) -> Tensor:
    """Momentum that looks a step ahead."""
    ahead = sgd(s, param, gradient, memory, number)
    return _add_decay(s, param, gradient) + s.momentum * ahead


def adam(s: SolverOptions, param: Tensor, gradient: Tensor, memory: Memory, number: Number) -> Tensor:
    """Weight decay is part of the gradient."""
    return _adam_step(_add_decay(s, param, gradient), memory, number)


def adamw(s: SolverOptions, param: Tensor, gradient: Tensor, memory: Memory, number: Number) -> Tensor:
    """Weight decay beside the scaled gradient."""
    return _adam_step(gradient, memory, number) + s.weight_decay * param


OPTIMIZERS: dict[str, Optimizer] = {"sgd": sgd, "nesterov": nesterov, "adam": adam, "adamw": adamw}


TORCH = "torch.optim."
# entry by entry, and proportional to the step size: only these can be a direction, and run in a stack of clients
REMEMBERED = {  # the names under which each keeps what it remembers
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg", "momentum_buffer"),
    "Adagrad": ("sum",),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adamax": ("exp_avg", "exp_inf"),
}


def find(name: str) -> Optimizer:
    """By its name, a class of `torch.optim`, or an own one as "module:function"."""
    if ":" in name:
        own: Optimizer = import_object("local.optimizer", name)
        _check_signature(name, own)
        return own
    if name.startswith(TORCH):
        if (kind := name.removeprefix(TORCH)) not in REMEMBERED:
            known = ", ".join(REMEMBERED)
            raise ConfigError(
                f'local.optimizer: "{name}": its step is not entry by entry and proportional to lr; of torch.optim '
                f"these are: {known}",
                code="config.name",
            )
        return partial(_torch_direction, kind)
    if name not in OPTIMIZERS:
        raise ConfigError(
            f'local.optimizer: no optimizer "{name}"; {nearest(name, OPTIMIZERS)}, a class such as "{TORCH}RMSprop", '
            'or your own "module:function"',
            code="config.name",
        )
    return OPTIMIZERS[name]


def _check_signature(name: str, own: Any) -> None:
    """Raise a `ConfigError` that says how an optimizer is called."""
    called = f"{name.partition(':')[2]}(options, param, gradient, memory, number)"
    try:
        inspect.signature(own).bind(*range(5))
    except TypeError as error:
        raise ConfigError(
            f'local.optimizer: "{name}" is called as {called} and returns the direction of a step; {error}'
        ) from None
    except ValueError:  # written in C: nobody can tell
        return


def check(solver: SolverOptions) -> None:
    """Raise a `ConfigError` for an optimizer that there is not, or that cannot do what is asked of it."""
    for options in (solver, *(_options_of(solver, part) for part in solver.parts)):
        find(options.optimizer)
        if not options.optimizer.startswith(TORCH):
            continue
        kind = options.optimizer.removeprefix(TORCH)
        if options.momentum and "momentum" not in _parameters(kind):
            raise ConfigError(f"local.momentum: {options.optimizer} has none")
        if options.weight_decay and "weight_decay" not in _parameters(kind):
            raise ConfigError(f"local.weight_decay: {options.optimizer} has none")
        if solver.keep_state:
            raise ConfigError(
                f"local.keep_state: {options.optimizer} begins anew in every round; name one of {', '.join(OPTIMIZERS)}"
            )


@cache
def _parameters(kind: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(torch.optim, kind)).parameters)


def _torch_direction(
    kind: str, s: SolverOptions, param: Tensor, gradient: Tensor, memory: Memory, number: Number
) -> Tensor:
    """How far one step of a class of torch goes at lr 1, backwards."""
    given = {k: v for k, v in {"momentum": s.momentum, "weight_decay": s.weight_decay}.items() if v}
    new = param.clone()
    # where a gradient is exactly 0 its root has no derivative: a tape then takes it for a constant
    new.grad = torch.where(gradient == 0, torch.zeros_like(gradient), gradient)
    optimizer = getattr(torch.optim, kind)([new], lr=1.0, differentiable=True, **given)
    names = [k for k in REMEMBERED[kind] if k != "momentum_buffer" or s.momentum]
    if memory or kind != "SGD":  # which has no momentum before its first step; the others' begins at 0
        known = memory or [torch.zeros_like(param) for _ in names]
        # torch would count in float32, in which 1 - 0.999 is off by 5e-5
        steps = {} if kind == "SGD" else {"step": torch.tensor(float(number) - 1, dtype=torch.float64, device="cpu")}
        optimizer.state[new] = steps | {k: v.clone() for k, v in zip(names, known, strict=True)}
    optimizer.step()
    memory[:] = [optimizer.state[new][k] for k in names]
    return param - new


class PartDirection(NamedTuple):
    """How the parameters of a part take their steps."""

    options: SolverOptions
    direction: Optimizer
    factor: float  # of the step size


def by_parameter(solver: SolverOptions, head: Iterable[str], names: Iterable[str]) -> dict[str, PartDirection]:
    """How each parameter takes its steps: as the first of `local.parts` says that it belongs to, else as all."""
    usual, heads = PartDirection(solver, find(solver.optimizer), 1.0), set(head)
    parts = []
    for part in solver.parts:
        options = _options_of(solver, part)
        parts.append((part.name, PartDirection(options, find(options.optimizer), part.factor)))

    def belongs(name: str, part: str) -> bool:
        return (name in heads) is (part == "head") if part in ("head", "body") else is_under(name, part)

    return {k: next((way for part, way in parts if belongs(k, part)), usual) for k in names}


def has_part(names: Iterable[str], part: str) -> bool:
    """Whether a model with these parameters has the part."""
    return part in ("head", "body") or any(is_under(name, part) for name in names)


def _options_of(solver: SolverOptions, part: PartOptions) -> SolverOptions:
    return replace(solver, optimizer=part.optimizer, momentum=part.momentum, weight_decay=part.weight_decay, parts=())


def first_memory(solver: SolverOptions, params: Params, head: Iterable[str] = ()) -> dict[str, Memory]:
    """Zeros in the shapes of what an optimizer remembers of each parameter: found by a step that is not taken."""
    ways, memory = by_parameter(solver, head, params), {k: list[Tensor]() for k in params}
    for k, v in params.items():
        ways[k].direction(ways[k].options, v, torch.zeros_like(v), memory[k], 1)
    return {k: [torch.zeros_like(v) for v in each] for k, each in memory.items()}


def _add_decay(s: SolverOptions, param: Tensor, gradient: Tensor) -> Tensor:
    return gradient + s.weight_decay * param if s.weight_decay else gradient


def _adam_step(gradient: Tensor, memory: Memory, number: Number) -> Tensor:
    first, second = memory or (torch.zeros_like(gradient), torch.zeros_like(gradient))
    # inside the root, so that the derivative of a step exists where the gradient is 0
    direction, *memory[:] = adam_direction(gradient, first, second, number, inside=1e-16)
    return direction


def _bias(beta: float, number: float | Tensor, like: Tensor) -> float | Tensor:
    return (1 - beta**number).to(like.dtype) if isinstance(number, Tensor) else 1 - beta**number


def adam_direction(
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    number: float | Tensor | None,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    inside: float = 0.0,
    beside: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The direction of a step of Adam, and both moments after it.

    The number of the step corrects the moments for having begun at 0; None leaves them as they are. `inside` is added
    to the second moment, `beside` to its root.
    """
    first = torch.lerp(first, gradient, 1 - betas[0])
    second = torch.lerp(second, gradient.square(), 1 - betas[1])
    mean, square = first, second
    if number is not None:
        mean, square = (v / _bias(beta, number, v) for v, beta in zip((first, second), betas, strict=True))
    root = (square + inside).sqrt() if inside else square.sqrt()
    return mean / (root + beside if beside else root), first, second
