"""Local optimizers: from a gradient to the direction of a step, before it is scaled by the step size.

Each is a function of the parameter, its gradient, what it remembers of earlier steps (empty at first) and the number of
the step; differentiable, so that a tape goes through it. Add one here, or name your own as "module:function". With
`local.keep_state` the memory begins as zeros and the number is a tensor: clients of a stack may have taken part in
other rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError, nearest
from fedtailor.plugins import import_object
from fedtailor.training.solver_options import SolverOptions

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


def find(name: str) -> Optimizer:
    """By its name, or an own one as "module:function"."""
    if ":" in name:
        own: Optimizer = import_object("local.optimizer", name)
        if not callable(own):
            raise ConfigError(f'local.optimizer: "{name}" is no function')
        return own
    if name not in OPTIMIZERS:
        raise ConfigError(f'local.optimizer: no optimizer "{name}"; {nearest(name, OPTIMIZERS)}', code="config.name")
    return OPTIMIZERS[name]


def first_memory(solver: SolverOptions, params: Params) -> dict[str, Memory]:
    """Zeros in the shapes of what an optimizer remembers of each parameter: found by a step that is not taken."""
    direction, memory = find(solver.optimizer), {k: list[Tensor]() for k in params}
    for k, v in params.items():
        direction(solver, v, torch.zeros_like(v), memory[k], 1)
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
