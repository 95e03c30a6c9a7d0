"""How a client takes its local steps: the options, and the way from `me.sgd` to the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import OwnLoss
from fedtailor.core.random import brief_stream
from fedtailor.core.rows import Rows
from fedtailor.core.trees import Params, Tree
from fedtailor.training.arithmetic import Arithmetic
from fedtailor.training.augmentation import draw
from fedtailor.training.batches import Batch, cut, orders_of, single, stacked, with_draws
from fedtailor.training.schedules import Schedule
from fedtailor.training.steps import Training, train


@dataclass(frozen=True)
class Solver:
    """Local steps, the same for every algorithm."""

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

    @property
    def is_plain(self) -> bool:
        """Whether a client's move is minus its step size times the sum of its gradients."""
        return self.is_even and self.optimizer == "sgd" and not (self.momentum or self.weight_decay or self.clip)

    @property
    def is_even(self) -> bool:
        """Whether all steps of a training have the same size."""
        return self.schedule.is_constant or self.schedule.over == "rounds"

    def lr_in(self, round: int) -> float:
        """The step size in a round, in its first step where steps differ."""
        return self.lr * self.schedule.in_round(round)

    def train(
        self, me: ClientContext, tensors: Tree, epochs: int, nth: int, loss: OwnLoss | None
    ) -> tuple[Params, Params]:
        """Trained parameters and the buffers after the last step, in the nth training of a call."""
        rows, experiment = me.experiment.data.train, me.experiment
        drawn: Callable[[bool], list[Batch]] = lambda is_stacked: self._batches(me, rows, epochs, nth, is_stacked)  # noqa: E731
        key = (*me.key, experiment.data.clients[me.members[0]], "training", nth)
        training = Training(experiment.model, experiment.loss, self, rows, drawn, key, loss)
        return train(training, tensors)

    def steps(self, me: ClientContext, epochs: int) -> Tensor:
        """How many steps a training of so many epochs takes at each client."""
        sizes = me.experiment.data.train.bounds(me.members)[1]
        least = self._least(me)
        counts = [
            me.experiment.environment.passes(i, epochs)
            * (self.epoch if self.epoch and n else len(cut(np.arange(n), self.batch_size or max(1, n), least)))
            for i, n in zip(me.members, sizes, strict=True)
        ]

        def make(is_stacked: bool) -> tuple[Tensor, ...]:
            numbers = me.model.like.new_tensor(counts, dtype=me.n.dtype)
            return (numbers if is_stacked else numbers[0],)

        return me.constants(make)[0]

    def _least(self, me: ClientContext) -> int:
        return 2 if me.model.batch_statistics else 1  # a single sample has no variance

    def _batches(self, me: ClientContext, rows: Rows, epochs: int, nth: int, is_stacked: bool) -> list[Batch]:
        clients, least = me.experiment.data.clients, self._least(me)
        starts, sizes = rows.bounds(me.members)
        size = self.batch_size or max(1, *sizes)
        orders = []
        for i, n in zip(me.members, sizes, strict=True):
            rng = brief_stream(*me.key, clients[i], "batches", nth)
            count = me.experiment.environment.passes(i, epochs)
            orders.append(orders_of(rng, n, count, self.epoch, size, least))
        if is_stacked:
            batches = stacked(starts, orders, size, me.n.dtype, least)
        else:
            batches = single(starts[0], orders[0], size, least)
        if self.augment is None:
            return batches
        draws = []
        for i, passes in zip(me.members, orders, strict=True):
            rng = brief_stream(*me.key, clients[i], "augment", nth)
            draws.append([draw(rng, len(order)) for order in passes])
        return with_draws(batches, draws, size, least)
