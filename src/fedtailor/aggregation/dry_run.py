"""A round with made-up replies: finds out before the first real one whether an algorithm can do with sums only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from fedtailor.aggregation.aggregate_only import Privacy
from fedtailor.core.aggregation import InTheOpen
from fedtailor.core.algorithm import reply_example
from fedtailor.core.client import Call
from fedtailor.core.engine import Engine, Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.per_client import PerClient
from fedtailor.core.record import Attendance
from fedtailor.core.server_steps import sent_for
from fedtailor.core.trees import Tree, tree_map
from fedtailor.errors import ConfigError


class _Stage:
    """An engine without clients: every reply is the declared example, every number in it a 1."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.calls: dict[str, set[tuple[bool, ...]]] = {}

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        self.calls.setdefault(call.function, set()).add(call.placed)
        example = reply_example(self.experiment.algorithm, call.function, self.experiment.model)
        yield Reply(tuple(clients), tree_map(lambda v: torch.ones_like(v).expand(len(clients), *v.shape), example))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def averages(experiment: Experiment) -> bool:
    """Whether the algorithm takes a mean of its replies."""
    seen = _Seen()
    _play(replace(experiment, aggregation=seen))
    return seen.means > 0


def averages_models(experiment: Experiment) -> bool:
    """Whether one of them is of models that it sent, so that a server optimizer has something to do."""
    seen = _Seen()
    _play(replace(experiment, aggregation=seen))
    return seen.of_models > 0


class _Seen(InTheOpen):
    """Counts means."""

    def __init__(self) -> None:
        super().__init__()
        self.means = self.of_models = 0

    def mean(self, fed: Federation, x: PerClient, weight: PerClient | None) -> Tree:
        self.means += 1
        self.of_models += sent_for(fed, x) is not None
        return super().mean(fed, x, weight)


def rehearse(experiment: Experiment, privacy: Privacy) -> None:
    """Raise a `ConfigError` if the algorithm looks at single replies, tapes, or sums what cannot be clipped."""
    hidden = replace(experiment, aggregation=replace(privacy, secure_sum=False))
    _play(hidden, experiment.algorithm.period)


def calls_made(experiment: Experiment) -> dict[str, set[tuple[bool, ...]]]:
    """Functions that the algorithm calls, and which parts of their messages are for each client alone."""
    stage = _Stage(replace(experiment, aggregation=InTheOpen()))
    _play(stage.experiment, experiment.algorithm.period, stage)
    return stage.calls


def _play(experiment: Experiment, rounds: int = 1, stage: _Stage | None = None) -> None:
    fed = Federation(cast(Engine, stage or _Stage(experiment)))
    server = experiment.algorithm.server_init(experiment.model)
    for round in range(1 - experiment.algorithm.preparation, 1 + rounds):
        everybody = tuple(range(len(experiment.data.clients)))
        fed.attendance = Attendance(round, everybody, everybody)
        try:
            server = experiment.algorithm.round(fed, server)
        except ConfigError:
            raise
        except Exception:  # made-up numbers need not suit an algorithm; what it asked for up to here was allowed
            return
