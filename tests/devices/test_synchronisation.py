"""A round reads few numbers off the device, and not more of them when clients take more steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedtailor import engines
from fedtailor.algorithms import make
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.models import build
from fedtailor.numerics import solve_log
from fedtailor.training.solver import Solver
from tests.devices import sim
from tests.devices.federations import play
from tests.helpers import ENGINES, F64, make_data, make_model

LEARN = {"outer_iterations": 0, "theta": (0.5,) * 4, "horizon": 1}


def counted(
    algorithm: str, options: dict[str, Any], engine: str, solver: Solver, model: str = "mlp"
) -> tuple[int, int, int]:
    """Reads, copies onto the device and iterations of solvers in a round."""
    data = make_data("regression" if model == "linear" else "classification")
    if model == "equilibrium":
        made = build(
            "deq-mlp",
            data.shape,
            data.outputs,
            seed=1,
            options={"width": 5, "hidden": 4, "max_iterations": 5},
            dtype=F64,
        )
    else:
        made = make_model(model, data)
    setting = Experiment(make(algorithm, options), made, data, solver, 3).on(torch.device("sim:0"))
    inside = engines.make(experiment=setting, **ENGINES[engine])
    inside.start()
    fed = Federation(inside)
    before = sim.reads(), sim.writes()
    with solve_log.watched() as solves:
        play(fed, first=1)
    after = sim.reads(), sim.writes()
    return after[0] - before[0], after[1] - before[1], sum(int(r.iterations.max()) for r in solves)


PLAIN = Solver(lr=0.1, batch_size=4)
ROUNDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "fedavg": lambda epochs: {"epochs": epochs},
    "fedrep": lambda epochs: {"head_epochs": epochs, "body_epochs": epochs},
    "ditto": lambda epochs: {"epochs": epochs, "personal_epochs": epochs},
    "fedselect": lambda epochs: {"epochs": epochs},
    "duw-fedavg": lambda epochs: LEARN | {"epochs": epochs},
}
OPTIMIZERS = {
    "sgd": PLAIN,
    "adam": Solver(optimizer="adam", lr=0.01, batch_size=4),
    "momentum-decay-clip": Solver(lr=0.1, batch_size=4, momentum=0.9, weight_decay=0.01, clip=0.5),
}


@pytest.mark.parametrize("engine", ["loop", "vmap2"])
@pytest.mark.parametrize("algorithm", ROUNDS)
def test_as_many_reads_in_8_epochs_as_in_1(algorithm: str, engine: str) -> None:
    few, _, _ = counted(algorithm, ROUNDS[algorithm](1), engine, PLAIN)
    many, _, _ = counted(algorithm, ROUNDS[algorithm](8), engine, PLAIN)
    assert few == many


@pytest.mark.parametrize("engine", ["loop", "vmap2"])
@pytest.mark.parametrize("solver", OPTIMIZERS)
def test_a_round_of_fedavg_has_few_reads_and_copies_whatever_the_steps(solver: str, engine: str) -> None:
    one = counted("fedavg", {"epochs": 1}, engine, OPTIMIZERS[solver])
    assert one == counted("fedavg", {"epochs": 8}, engine, OPTIMIZERS[solver])
    groups = 4 if engine == "loop" else 2
    assert one[0] <= 3 * groups  # checks of the reply and of the state, one read each, and the weight


def test_learn2pfed_reads_as_much_with_8_cells_as_with_1() -> None:
    few, many = (
        counted("learn2pfed", {"cells": cells, "outer": "train"}, "vmap", PLAIN, "linear")[0] for cells in (1, 8)
    )
    assert few == many


@pytest.mark.parametrize("engine", ["loop", "vmap2"])
def test_an_equilibrium_reads_once_per_iteration_at_most(engine: str) -> None:
    few, many = (counted("fedeq", {"epochs": epochs}, engine, PLAIN, "equilibrium") for epochs in (1, 8))
    assert 0 < many[2] > few[2]
    assert many[0] - few[0] <= many[2] - few[2]
