"""The rounds of an algorithm for all sites of one process together, where nothing happens to replies but sums.

The text of the algorithm is the same as in any federation; what an engine does for clients that may fail, be away or
send nonsense is left out. Where a reply is one that a federation would not use, training is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.client import initial, invoke, personal
from fedtailor.core.data import count
from fedtailor.core.experiment import Experiment
from fedtailor.core.model import Model
from fedtailor.core.reduce import Call, reply_faults
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.engines.inprocess import group_clients

TOGETHER = 2**23  # numbers of the padded rows of a stack of sites


class NotUsable(Exception):
    """A reply that a federation would not use."""


class StackedReplies:
    """Replies of stacks of sites, each with a leading dimension."""

    def __init__(self, stacks: list[Tree]) -> None:
        self.stacks = stacks


class StackedSites:
    """What the rounds of an algorithm need of a federation."""

    def __init__(self, experiment: Experiment, largest: float, check: Callable[[], None]) -> None:
        self.experiment, self.largest, self.check = experiment, largest, check
        sites = range(len(experiment.data.clients))
        self.cohort = tuple(sites)
        self.groups = _stacks(experiment)
        self.states = [initial(experiment, group, is_stacked=True)[0] for group in self.groups]
        self.round_number = self._calls = 0

    @staticmethod
    def suits(experiment: Experiment) -> bool:
        """Whether nothing happens to replies but that they are added up."""
        return (
            experiment.aggregation.is_plain
            and experiment.device.type == "cpu"
            and not experiment.by_architecture
            and not experiment.environment.fails
            and not experiment.model.private_buffers
            and experiment.optimizer_state is None
        )

    @property
    def model(self) -> Model:
        return self.experiment.model

    def run_round(self, round: int, server: Tree) -> Tree:
        """The server's state after a round."""
        self.round_number, self._calls = round, 0
        return self.experiment.algorithm.round(self, server)

    def map(self, fn: Callable[..., Any], *message: Tree) -> StackedReplies:
        """Run a client function at all sites."""
        self.check()
        call = Call(fn.__name__, self.round_number, self._calls, message, (False,) * len(message))
        self._calls += 1
        replies = []
        for i, group in enumerate(self.groups):
            out = invoke(self.experiment, group, call, self.states[i], {}, None, is_stacked=True)
            if any(reply_faults(out.reply, len(group), [], self.largest)):
                raise NotUsable
            self.states[i] = out.state
            replies.append(out.reply)
        return StackedReplies(replies)

    def sum(self, replies: StackedReplies) -> Tree:
        """The sum over sites."""
        return tree_map(lambda *parts: torch.stack([part.sum(0) for part in parts]).sum(0), *replies.stacks)

    def report(self, **values: Any) -> None:
        """Of these rounds nothing is recorded."""

    @property
    def state(self) -> Tree:
        """What the sites keep, stacked in their order."""
        order = self.order
        return tree_map(lambda *parts: torch.cat(parts)[order], *self.states)

    @property
    def order(self) -> Tensor:
        return torch.tensor([site for group in self.groups for site in group], device="cpu").argsort()

    def models(self, round: int, server: Tree) -> Params:
        """The personal models, stacked in the order of the sites."""
        parts = [
            personal(self.experiment, group, round, state, {}, server, is_stacked=True)
            for group, state in zip(self.groups, self.states, strict=True)
        ]
        order = self.order
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def _stacks(experiment: Experiment) -> list[tuple[int, ...]]:
    """Sites that are computed together: of similar size, and no more than fit in memory."""
    rows = experiment.data.train
    width = max(int(rows.x.shape[1]) if isinstance(rows.x, Tensor) and count(rows.x) else 1, 1)
    out: list[tuple[int, ...]] = []
    for group in group_clients(experiment, range(len(experiment.data.clients)), len(experiment.data.clients)):
        waiting: list[int] = []
        for site in group:  # from small ones to large ones
            longest = max(int(rows.sizes[site]), 1)
            is_uneven = waiting and longest > 4 * max(int(rows.sizes[waiting[0]]), 16)
            if waiting and (is_uneven or (len(waiting) + 1) * longest * width > TOGETHER):
                out.append(tuple(waiting))
                waiting = []
            waiting.append(site)
        if waiting:
            out.append(tuple(waiting))
    return out
