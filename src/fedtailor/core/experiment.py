"""What all clients of a run have in common, and the data that each of them finds beside itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtailor.core.aggregation import IN_THE_OPEN, Aggregation
from fedtailor.core.environment import Environment
from fedtailor.core.model import Model
from fedtailor.core.random import seeded
from fedtailor.core.samples import FederatedData
from fedtailor.core.task import LOSSES
from fedtailor.core.trees import Params, Tree

if TYPE_CHECKING:
    from fedtailor.core.algorithm import Algorithm
    from fedtailor.core.context import ClientContext

# (tensors of the model, x, y) -> one number per sample; one that has parameters named so is also given `weight`, which
# is 0 for padding of a stack, and `index`, the rows of the client's training samples
OwnLoss = Callable[..., Tensor]
AfterStep = Callable[[Params], Params]


class OwnSteps(NamedTuple):
    """What an algorithm has its clients do otherwise in their local steps."""

    loss: OwnLoss | None = None  # in place of the task's
    after_step: AfterStep | None = None


class LocalSolver(Protocol):
    """How a client takes its local steps: all that core knows of it. `training.steps.Solver` is one."""

    @property
    def lr(self) -> float: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def is_even(self) -> bool: ...
    def lr_in(self, round: int) -> float: ...

    @property
    def keeps_state(self) -> bool: ...

    def train(
        self, me: ClientContext, tensors: Tree, epochs: int, nth: int, own: OwnSteps
    ) -> tuple[Params, Params, Tree]:
        """Parameters, buffers and the optimizer's memory after the last step, in the nth training of a call."""

    def steps(self, me: ClientContext, epochs: int) -> Tensor:
        """How many steps that takes."""


class ServerSteps(Protocol):
    """How a server goes from the model it sent out towards the mean of those that came back."""

    def step(self, sent: Params, mean: Params, memory: Tree) -> tuple[Params, Tree]:
        """The next model and what to remember; `memory` is None at first."""


class Mixing(NamedTuple):
    """Whether what a model says of a sample depends on the other samples of the batch."""

    in_training: bool
    in_prediction: bool


@dataclass(frozen=True)
class Experiment:
    """One algorithm, one model, one federation's data, one seed."""

    algorithm: Algorithm
    model: Model
    data: FederatedData
    solver: LocalSolver
    seed: int
    environment: Environment = field(default_factory=Environment)
    unseen: FederatedData | None = None  # clients that take no part; they come when everything is learned
    aggregation: Aggregation = IN_THE_OPEN
    server_steps: ServerSteps | None = None  # from the mean of models to the next one; None: the mean is it
    optimizer_state: Tree = None  # what a client's optimizers remember before the first round; None: they begin anew

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Of every sample."""
        return LOSSES[self.data.task]

    @cached_property
    def mixing(self) -> Mixing:
        """Found by trial: the first sample, once among others and once among copies of itself."""
        x = self.data.train.x[:8]
        return Mixing(self._mixes(x, training=True), self._mixes(x, training=False))

    def _mixes(self, x: Tensor, *, training: bool) -> bool:
        if len(x) < 2:
            return self.model.batch_statistics and training
        model = self.model

        def first(batch: Tensor) -> Tensor:
            tensors = {k: v.clone() for k, v in (model.params | model.private_buffers).items()}
            with torch.no_grad(), seeded("mixing"):
                return model(tensors, batch, training=training)[0]

        among_others, alone = first(x), first(x[:1].expand_as(x))
        return not torch.allclose(among_others, alone, rtol=1e-4, atol=1e-6, equal_nan=True)
