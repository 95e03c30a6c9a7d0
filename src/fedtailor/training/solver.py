"""Local training as algorithms ask for it: from `me.sgd` to the batches of a client and the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedtailor.core.context import ClientContext, OwnSteps, Setting
from fedtailor.core.data import Rows
from fedtailor.core.random import brief_stream
from fedtailor.core.trees import Params, Tree
from fedtailor.training.augmentation import draw
from fedtailor.training.batches import Batch, cut, orders_of, single, stacked, with_draws
from fedtailor.training.specification import SolverOptions, Training, wants
from fedtailor.training.steps import train


@dataclass(frozen=True)
class Solver(SolverOptions):
    """Local steps, the same for every algorithm."""

    def train(
        self, me: ClientContext, tensors: Tree, epochs: int, nth: int, own: OwnSteps
    ) -> tuple[Params, Params, Tree]:
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
        counts = self.count_steps(me.experiment, me.members, epochs)

        def make(is_stacked: bool) -> tuple[Tensor, ...]:
            numbers = me.model.like.new_tensor(counts, dtype=me.n.dtype)
            return (numbers if is_stacked else numbers[0],)

        return me.constants(make)[0]

    def count_steps(self, setting: Setting, clients: Sequence[int], epochs: int) -> list[int]:
        sizes, least = setting.data.train.bounds(clients)[1], self._least(setting)
        return [
            setting.environment.passes(i, epochs)
            * (self.epoch if self.epoch and n else len(cut(np.arange(n), self.step_size or max(1, n), least)))
            for i, n in zip(clients, sizes, strict=True)
        ]

    def _least(self, setting: Setting) -> int:
        return 2 if setting.model.batch_statistics else 1  # a single sample has no variance

    def _batches(self, me: ClientContext, rows: Rows, epochs: int, nth: int, is_stacked: bool) -> list[Batch]:
        clients, least = me.experiment.data.clients, self._least(me.experiment)
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
