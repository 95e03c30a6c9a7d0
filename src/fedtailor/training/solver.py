"""How a client takes its local steps: the options, and the way from `me.sgd` to the operator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from torch import Tensor

from fedtailor.core.context import ClientContext, OwnSteps
from fedtailor.core.data import Rows
from fedtailor.core.random import brief_stream
from fedtailor.core.trees import Params, Tree
from fedtailor.training.arithmetic import Arithmetic
from fedtailor.training.augmentation import draw
from fedtailor.training.batches import Batch, cut, orders_of, single, stacked, with_draws
from fedtailor.training.schedules import Schedule
from fedtailor.training.steps import Training, train, wants


@dataclass(frozen=True)
class Work:
    """What a step and an epoch are made of, and what lasts from one round to the next."""

    epoch: int = 0  # steps that count as an epoch; 0 is a pass over the data
    accumulate: int = 1  # batches whose gradients make one step
    keep_state: bool = False  # a client's optimizer goes on in its next round where it ended
    refit: int = 0  # epochs in which a private part is fitted to the newest common part before it predicts
    optimizer_state: Tree = field(default=None, compare=False)  # what it remembers before the first


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
    work: Work = field(default_factory=Work)

    @property
    def epoch(self) -> int:
        """Steps that count as an epoch; 0 is a pass over the data."""
        return self.work.epoch

    @property
    def refit(self) -> int:
        """Epochs in which a private part is fitted to the newest common part before it predicts."""
        return self.work.refit

    @property
    def optimizer_state(self) -> Tree:
        """What a client's optimizers remember before the first round; None: they begin anew in every one."""
        return self.work.optimizer_state

    @property
    def step_size(self) -> int:
        """Samples of a step; 0 is the whole data."""
        return self.batch_size * self.work.accumulate

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep what an optimizer remembers; plain descent remembers nothing."""
        return self.work.keep_state and not (self.optimizer == "sgd" and not self.momentum)

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
        self, me: ClientContext, tensors: Tree, epochs: int, nth: int, own: OwnSteps
    ) -> tuple[Params, Params, Tree]:
        """Parameters, buffers and the optimizer's memory after the last step, in the nth training of a call."""
        rows, experiment = me.experiment.data.train, me.experiment

        def drawn(is_stacked: bool) -> list[Batch]:
            batches = self._batches(me, rows, epochs, nth, is_stacked)
            if not batches or own.loss is None or "index" not in wants(own.loss):
                return batches
            # an own loss counts a client's rows from 0
            firsts = batches[0].rows.new_tensor(rows.bounds(me.members)[0])
            return [replace(b, index=b.rows - (firsts[:, None] if is_stacked else firsts[0])) for b in batches]

        key = (*me.key, experiment.data.clients[me.members[0]], "training", nth)
        training = Training(experiment.model, experiment.loss, self, rows, drawn, key, *own)
        return train(training, tensors)

    def steps(self, me: ClientContext, epochs: int) -> Tensor:
        """How many steps a training of so many epochs takes at each client."""
        sizes = me.experiment.data.train.bounds(me.members)[1]
        least = self._least(me)
        counts = [
            me.experiment.environment.passes(i, epochs)
            * (self.epoch if self.epoch and n else len(cut(np.arange(n), self.step_size or max(1, n), least)))
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
        size = self.step_size or max(1, *sizes)
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
