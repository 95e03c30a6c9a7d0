"""What the steps of a local training depend on: the options of a solver, and what else is fixed before the first."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from torch import Tensor

from fedtailor.core.context import AfterStep, OwnLoss
from fedtailor.core.data import Rows, take
from fedtailor.core.model import Model
from fedtailor.core.task import Loss
from fedtailor.core.trees import Tree
from fedtailor.training.arithmetic import Arithmetic
from fedtailor.training.augmentation import augment, augment_target
from fedtailor.training.batches import Batch, send_samples

ScheduleName = Literal["constant", "cosine", "linear", "step"]


@dataclass(frozen=True)
class Schedule:
    """The step size over the rounds of a run, or over the steps of a training, as a factor of `local.lr`.

    Grows over `warmup`, then falls to `last` of its height; `step` multiplies by `decay` every so often.
    """

    name: ScheduleName = "constant"
    over: Literal["rounds", "steps"] = "rounds"
    length: int = 0  # rounds of the run; steps of a training are counted when it begins
    warmup: int = 0
    last: float = 0.0
    decay: float = 0.1
    every: int = 0

    @property
    def is_constant(self) -> bool:
        return self.name == "constant" and not self.warmup

    def in_round(self, round: int) -> float:
        """In a round of the run, the first is 1; before that, where something is prepared, as in the first."""
        return self.factor(max(round - 1, 0), self.length) if self.over == "rounds" else 1.0

    def in_step(self, step: int, steps: int) -> float:
        """In a step of a training, the first is 0."""
        return self.factor(step, steps) if self.over == "steps" else 1.0

    def factor(self, at: int, length: int) -> float:
        """At place `at` of 0 .. length - 1."""
        if at < self.warmup:
            return (at + 1) / self.warmup
        if self.name == "step":
            return float(self.decay ** ((at - self.warmup) // self.every))
        done = min((at - self.warmup) / max(length - self.warmup - 1, 1), 1.0)
        if self.name == "cosine":
            return self.last + (1 - self.last) * (1 + math.cos(math.pi * done)) / 2
        return 1 - (1 - self.last) * done if self.name == "linear" else 1.0


@dataclass(frozen=True)
class PartOptions:
    """Where the parameters of a part of the model take other steps than the rest."""

    name: str  # "head", "body", a module or a glob
    optimizer: str = "sgd"
    factor: float = 1.0  # of the step size
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class SolverOptions:
    """The fields of `Solver`, the same for every algorithm."""

    optimizer: str = "sgd"  # a name in `optimizers`, or "module:function"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # largest norm of a step's gradient; 0 is no limit
    batch_size: int = 32  # 0 is the whole data
    augment: Literal["crop-flip"] | None = None
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    schedule: Schedule = field(default_factory=Schedule)
    epoch: int = 0  # steps that count as an epoch; 0 is a pass over the data
    accumulate: int = 1  # batches whose gradients make one step
    keep_state: bool = False  # a client's optimizer goes on in its next round where it ended
    parts: tuple[PartOptions, ...] = ()  # the first that a parameter belongs to says how it takes its steps
    refit: int = 0  # epochs in which a private part is fitted to the newest common part before it predicts
    optimizer_state: Tree = field(default=None, compare=False)  # what optimizers remember at first; None: nothing

    @property
    def step_size(self) -> int:
        """Samples of a step; 0 is the whole data."""
        return self.batch_size * self.accumulate

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep what an optimizer remembers; plain descent remembers nothing."""
        remembers = [p.optimizer != "sgd" or p.momentum > 0 for p in self.parts]
        return self.keep_state and any([self.optimizer != "sgd" or self.momentum > 0, *remembers])

    @property
    def is_plain(self) -> bool:
        """Whether a client's move is minus its step size times the sum of its gradients."""
        is_sgd = self.optimizer == "sgd" and not (self.momentum or self.weight_decay or self.clip)
        return self.is_even and is_sgd and not self.parts

    @property
    def is_even(self) -> bool:
        """Whether all steps of a training have the same size."""
        return self.schedule.is_constant or self.schedule.over == "rounds"

    def lr_in(self, round: int) -> float:
        """The step size in a round, in its first step where steps differ."""
        return self.lr * self.schedule.in_round(round)


@dataclass(frozen=True)
class Training:
    """What is fixed before the first step. The tensors that a gradient may flow to travel beside it, as a tree:

    params, buffers, frozen: the parts of the model; only params are trained.
    center, mu: adds the gradient mu (params - center) of a proximal term, for the entries of center; or both None.
    mask: 0 where a parameter must stay as it is; None without one.
    lr: step size, possibly one per client.
    memory: what the optimizer remembers of earlier rounds, and of how many steps; None where it begins anew.
    """

    model: Model
    loss: Loss
    solver: SolverOptions
    data: Rows
    draw: Callable[[bool], Sequence[Batch]]  # the batches of one client (False) or of the stack (True)
    key: tuple[str | int, ...]  # of the stream for models that draw random numbers
    own_loss: OwnLoss | None = None  # in place of model and loss
    after_step: AfterStep | None = None  # such as a projection
    structure: Tree = None  # shaped as the tree of tensors
    is_stacked: bool = False

    @property
    def is_own(self) -> bool:
        """Whether steps are not those of the task's loss alone."""
        return self.own_loss is not None or self.after_step is not None

    def samples(self, batch: Batch) -> tuple[Tree, Tensor]:
        x, y = send_samples((take(self.data.x, batch.rows), take(self.data.y, batch.rows)), self.model.device)
        if batch.drawn is None:
            return x, y
        offsets, flips = batch.drawn[..., :2], batch.drawn[..., 2]
        return augment(x, offsets, flips), augment_target(y, x, offsets, flips)


@lru_cache(maxsize=64)
def wants(loss: OwnLoss) -> tuple[str, ...]:
    """What a loss of the caller's asks for by name, beside tensors, x and y: "weight", "index" or both."""
    names = inspect.signature(loss).parameters
    return tuple(name for name in ("weight", "index") if name in names)
