"""Rounds without training steps that show which local trainings an algorithm has, for `local.keep_state`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedtailor.core.context import ClientContext, OwnSteps
from fedtailor.core.experiment import Experiment, LocalSolver
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ConfigError
from fedtailor.training.optimizers import first_memory
from fedtailor.training.solver import Solver

ROUNDS = 2  # some algorithms do something else in their first
CLIENTS = 2


@dataclass(frozen=True)
class _Unmoved:
    """A solver that takes no step and remembers what it was to train."""

    solver: Solver
    trained: dict[str, Params] = field(default_factory=dict)
    optimizer_state: Tree = field(default_factory=dict)  # of which nothing is known yet

    def train(
        self, me: ClientContext, tensors: Tree, epochs: int, nth: int, own: OwnSteps
    ) -> tuple[Params, Params, Tree]:
        params: Params = tensors["params"]
        function = "" if me.optimizers is None else me.optimizers.function
        if function:
            self.trained.setdefault(f"{function}.{nth}", {k: torch.zeros_like(v).detach() for k, v in params.items()})
        return params, tensors["buffers"], None

    def steps(self, me: ClientContext, epochs: int) -> Tensor:
        return self.solver.steps(me, epochs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.solver, name)


def with_optimizer_state(experiment: Experiment) -> Experiment:
    """The same experiment with room for what each training of its algorithm remembers, if that is to be kept."""
    solver = experiment.solver
    if not solver.keeps_state or not int(experiment.data.train.sizes.sum()):  # a server without rows keeps nothing
        return experiment
    assert isinstance(solver, Solver)
    recorder = _Unmoved(solver)
    some = _smallest(experiment)
    rehearsed = replace(experiment, solver=cast(LocalSolver, recorder))
    _play(rehearsed, some)
    if not recorder.trained:
        name = experiment.algorithm.title or type(experiment.algorithm).__name__
        raise ConfigError(f"local.keep_state: {name} has no local training whose optimizer could be kept")
    zero = experiment.model.like.new_zeros((), dtype=torch.int64)
    head = experiment.model.head
    slots = {slot: {"count": zero, "memory": first_memory(solver, p, head)} for slot, p in recorder.trained.items()}
    return replace(experiment, solver=replace(solver, optimizer_state=slots))


def _smallest(experiment: Experiment) -> list[int]:
    sizes = experiment.data.train.sizes.tolist()
    return sorted(sorted(range(len(sizes)), key=lambda c: (sizes[c] < 2, sizes[c]))[:CLIENTS])


def _play(experiment: Experiment, clients: Sequence[int]) -> None:
    engine = InProcess(experiment, clients)
    engine.start()
    fed, algorithm = Federation(engine), experiment.algorithm
    server = algorithm.server_init(experiment.model)
    for round in range(1 - algorithm.preparation, 1 + ROUNDS):
        try:
            server = fed.run_round(round, clients, server)
        except ConfigError:
            raise
        except Exception:  # of clients that do not move; what was trained up to here is known
            return
