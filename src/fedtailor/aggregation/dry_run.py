"""A round with made-up replies: finds out before the first real one what an algorithm asks of its federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedtailor.aggregation.secure import Secure, declared_sum
from fedtailor.core.algorithm import reply_example
from fedtailor.core.engine import Engine
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Attendance, Federation
from fedtailor.core.reduce import Aggregation, Call, Open, PerClient, Reply
from fedtailor.core.trees import Tree, tree_map
from fedtailor.errors import ConfigError


class _Stage:
    """An engine without clients: every reply is the declared example, every number in it a 1."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.calls: dict[str, set[tuple[bool, ...]]] = {}
        self.counts = Counter[int]()  # of calls, by round

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        self.calls.setdefault(call.function, set()).add(call.placed)
        self.counts[call.round] += 1
        example = reply_example(self.experiment.algorithm, call.function, self.experiment.model)
        yield Reply(tuple(clients), tree_map(lambda v: torch.ones_like(v).expand(len(clients), *v.shape), example))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@dataclass(frozen=True)
class _UnsealedSums(Open):
    """Refuses what secure sums refuse, and adds up made-up replies in the open."""

    hides = Secure.hides

    def sum(self, fed: Any, x: PerClient, weight: PerClient | None) -> tuple[Tree, Tensor]:
        declared_sum(fed, x, weight)
        return super().sum(fed, x, weight)


@dataclass
class _CountingFederation(Federation):
    means: int = 0
    of_models: int = 0
    is_whole: bool = True  # no made-up number has ended it early

    def mean(self, x: PerClient, weight: PerClient | None = None, stale: Tree = None) -> Tree:
        self.means += 1
        self.of_models += self.sent_for(x) is not None
        return super().mean(x, weight, stale)


def means_taken(experiment: Experiment) -> tuple[int, int]:
    """How many means of replies a round takes, and how many of them are of models that were sent out."""
    fed = _play(replace(experiment, aggregation=Aggregation()))
    return fed.means, fed.of_models


def calls_made(experiment: Experiment) -> dict[str, set[tuple[bool, ...]]]:
    """Functions that the algorithm calls, and which parts of their messages are for each client alone."""
    fed = _play(replace(experiment, aggregation=Aggregation()), experiment.algorithm.period)
    return cast(_Stage, fed.engine).calls


def most_calls(experiment: Experiment) -> int:
    """The calls that the longest round of the algorithm makes; what it declares, where that depends on data."""
    algorithm = experiment.algorithm
    if algorithm.settles:
        return algorithm.most_calls
    fed = _play(replace(experiment, aggregation=Aggregation()), algorithm.period)
    return max(cast(_Stage, fed.engine).counts.values(), default=0) if fed.is_whole else algorithm.most_calls


def rehearse(experiment: Experiment) -> None:
    """Raise a `ConfigError` if the algorithm looks at hidden replies, tapes, or makes sums that are refused."""
    aggregation = experiment.aggregation
    if aggregation.reduction.is_sealed:
        aggregation = replace(aggregation, reduction=_UnsealedSums())
    _play(replace(experiment, aggregation=aggregation), experiment.algorithm.period)


def _play(experiment: Experiment, rounds: int = 1) -> _CountingFederation:
    fed = _CountingFederation(cast(Engine, _Stage(experiment)))
    server = experiment.algorithm.server_init(experiment.model)
    for round in range(1 - experiment.algorithm.preparation, 1 + rounds):
        everybody = tuple(range(len(experiment.data.clients)))
        fed.attendance = Attendance(round, everybody, everybody)
        try:
            server = experiment.algorithm.round(fed, server)
        except ConfigError:
            raise
        except Exception:  # made-up numbers need not suit an algorithm; what it asked for up to here was allowed
            fed.is_whole = False
            break
    return fed
