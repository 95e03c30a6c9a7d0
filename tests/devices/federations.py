"""Federations on a device, and all that a few of their rounds make, brought back to the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtailor import engines
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree, to_device
from fedtailor.testing import contract
from tests.helpers import ENGINES, SOLVER, everything, make_data, make_model

CPU = torch.device("cpu")
CASES = contract.CASES | {"logistic": {"model": "linear"}}


def experiment(algorithm: Algorithm, case: dict[str, Any], device: str = "cpu") -> Experiment:
    """Four small clients on a device."""
    options = dict(case)
    model, buffers = options.pop("model", "mlp"), options.pop("buffers", "private")
    solver = options.pop("solver", SOLVER)
    data = make_data(**options)
    made = Experiment(algorithm, make_model(model, data, buffers), data, solver, 3)
    return made.on(torch.device(device))


def federation(algorithm: Algorithm, case: str, device: str = "cpu", engine: str = "loop") -> Federation:
    """Their federation before its first round."""
    made = engines.make(experiment=experiment(algorithm, CASES[case], device), **ENGINES[engine])
    made.start()
    return Federation(made)


def play(fed: Federation, server: Tree = None, first: int = 0, rounds: int = 1) -> Tree:
    """The server's state after some rounds with all clients, none of which may fail."""
    setting = fed.engine.experiment
    server = setting.algorithm.server_init(setting.model) if server is None else server
    for round in range(first, first + rounds):
        server = fed.run_round(round, range(len(setting.data.clients)), server)
    assert not fed.record.faults, fed.record.faults[0]
    return server


def results(fed: Federation, server: Tree) -> dict[str, Tensor]:
    """Server, private states, personal models and metrics; the first three must lie where the model does."""
    found = everything(fed, server)
    for path, value in found.items():
        assert value.device == fed.engine.experiment.device, path
    made: dict[str, Tensor] = to_device(found, CPU)
    return made
