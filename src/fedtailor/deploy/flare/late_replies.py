"""Replies that come after their round has closed, counted in a later one (FedBuff: Nguyen et al., AISTATS 2022).

A late reply moved the model that it was sent; the next round's model is moved by as much, times (1 + rounds late) to
the power of -`federation.staleness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fedtailor.aggregation.dry_run import calls_made
from fedtailor.aggregation.noise import changed_parts
from fedtailor.core.algorithm import COUNT, client_functions
from fedtailor.core.client import Call
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Tree, tree_map
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class Late:
    """A reply that has come, to a call of an earlier round; its site has kept the state after it."""

    call: Call
    reply: Tree


@dataclass
class Buffer:
    """Of each client at most one."""

    power: float
    sent: dict[int, Call] = field(default_factory=dict)  # to those who are late
    come: dict[int, Late] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)  # in this round: client -> rounds late

    def state(self, client: int, kept_round: int) -> int:
        """The round whose state a client goes on from."""
        return self.come[client].call.round if client in self.come else kept_round

    def replies(self, call: Call, clients: Sequence[int]) -> dict[int, Tree]:
        """Late replies of some of these clients, as replies to this call."""
        self.used = {c: call.round - self.come[c].call.round for c in clients if c in self.come}
        if call.number and (self.come or self.sent):
            raise ConfigError(f'federation.late = "buffer": {call.function} is a second question in round {call.round}')
        return {c: rebased(self.come[c], call, self.power) for c in clients if c in self.come}

    def commit(self) -> None:
        """The round has ended with them."""
        self.come = {c: late for c, late in self.come.items() if c not in self.used}


def rebased(late: Late, call: Call, power: float) -> Tree:
    """Parts that are new versions of what was sent, as changes of what is sent now; the others as they are."""
    weight = (1 + call.round - late.call.round) ** -power
    parts = list(late.reply) if isinstance(late.reply, tuple) else [late.reply]
    for i, j in changed_parts(late.reply, late.call.args, late.call.placed).items():
        change = tree_map(torch.sub, parts[i], late.call.args[j])
        parts[i] = tree_map(lambda now, moved: now + weight * moved, call.args[j], change)
    return tuple(parts) if isinstance(late.reply, tuple) else parts[0]


def check(experiment: Experiment) -> None:
    """Refuse methods of which a late reply cannot be counted."""
    algorithm = experiment.algorithm
    name = algorithm.title or type(algorithm).__name__
    calls = calls_made(experiment)
    if sum(len(ways) for ways in calls.values()) != 1 or any(True in way for ways in calls.values() for way in ways):
        raise ConfigError(f'federation.late = "buffer": {name} asks more than one thing, or each client its own')
    if experiment.model.has_common_statistics:
        raise ConfigError('federation.late = "buffer": variances may become negative; set model.buffers = "private"')
    (function,) = calls
    sends = client_functions(algorithm)[function].sends  # type: ignore[attr-defined]
    for spec in sends if isinstance(sends, tuple) else (sends,):
        if spec is not None and spec != COUNT and not spec.is_model:
            raise ConfigError(f'federation.late = "buffer": {name} sends "{spec.name}", which is no model to average')
