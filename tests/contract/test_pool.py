"""The pool gives what loop gives, bit for bit, with any number of workers."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.core.environment import Environment
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import items, tree_map
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.pool.pool import Pool
from fedtailor.testing.contract import tolerance
from fedtailor.training.solver import Solver
from tests.contract.test_tape import MODELS, Taped
from tests.helpers import (
    EVEN_SIZES,
    SOLVER,
    assert_equal,
    brief,
    everything,
    make_data,
    make_model,
    states,
    suits,
    usual,
    variants,
)

VARIANTS = {name: brief(algorithm) for name, algorithm in variants().items()}
CASES: dict[str, dict[str, Any]] = {
    "batchnorm-private": {"model": "normed", "sizes": EVEN_SIZES},
    "batchnorm-mean": {"model": "normed", "sizes": EVEN_SIZES, "buffers": "mean"},
    "conv": {"model": "conv", "shape": (1, 6, 6)},
    "adam": {"solver": Solver(optimizer="adam", lr=0.01, batch_size=4)},
}
SEVERAL = ["fedavg", "fedrep", "fedselect", "duw-fedavg", "learn2pfed-net"]  # states, masks, ragged replies, a tape


def setting(algorithm: str, case: dict[str, Any]) -> Experiment:
    case = dict(case)
    model, buffers = case.pop("model", "mlp"), case.pop("buffers", "private")
    solver = case.pop("solver", SOLVER)
    data = make_data(**case)
    return Experiment(VARIANTS[algorithm], make_model(model, data, buffers), data, solver, 3, Environment())


def outcome(engine: Any) -> tuple[dict[str, Tensor], Any]:
    """After rounds with all clients, then with states put back, then with some of the clients."""
    engine.start()
    fed = Federation(engine)
    algorithm, model = engine.experiment.algorithm, engine.experiment.model
    server = fed.run_round(0, range(4), algorithm.server_init(model))
    engine.set_states(tree_map(torch.clone, engine.get_states()))
    server = fed.run_round(1, (0, 2), server)
    server = fed.run_round(2, (3, 0, 1), server)
    assert fed.record.faults == []
    return everything(fed, server), fed.traffic


@cache
def reference(algorithm: str, case: str = "") -> tuple[dict[str, Tensor], Any]:
    return outcome(InProcess(setting(algorithm, CASES[case] if case else usual(VARIANTS[algorithm]))))


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        missing = value.isnan() if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)
        assert torch.equal(found[path][~missing], value[~missing]), path
        assert torch.equal(found[path] != found[path], missing), path


@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [*((a, 2) for a in VARIANTS), *((a, workers) for a in SEVERAL for workers in (1, 4))],
)  # four for every algorithm: tests/silent/test_engines.py
def test_every_algorithm(algorithm: str, workers: int) -> None:
    pool = Pool(setting(algorithm, usual(VARIANTS[algorithm])), workers)
    found, traffic = outcome(pool)
    pool.close()
    assert_same_bits(found, reference(algorithm)[0])
    assert traffic == reference(algorithm)[1]


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_every_algorithm_stacked_in_the_workers(algorithm: str) -> None:
    pool = Pool(setting(algorithm, usual(VARIANTS[algorithm])), 2, chunk=3)
    found, traffic = outcome(pool)
    pool.close()
    assert_equal(found, reference(algorithm)[0], tolerance(VARIANTS[algorithm]))
    assert traffic == reference(algorithm)[1] or VARIANTS[algorithm].settles


@pytest.mark.parametrize(
    ("algorithm", "case"), [(a, c) for a in SEVERAL for c in CASES if suits(VARIANTS[a], CASES[c])]
)
def test_several_models(algorithm: str, case: str) -> None:
    pool = Pool(setting(algorithm, CASES[case]), 2)
    found, traffic = outcome(pool)
    pool.close()
    assert_same_bits(found, reference(algorithm, case)[0])
    assert traffic == reference(algorithm, case)[1]


@pytest.mark.parametrize("model", MODELS)
def test_tape(model: str) -> None:
    data = make_data(**MODELS[model])
    name, _, policy = model.partition("-")
    made = Experiment(Taped(), make_model(name, data, "mean" if policy else "private"), data, SOLVER, 3)
    outcomes = []
    for engine in (InProcess(made), Pool(made, 2)):
        engine.start()
        fed = Federation(engine)
        server = fed.run_round(0, range(4), made.algorithm.server_init(made.model))
        outcomes.append(dict(items({"server": server, "states": states(fed)})))
    assert_same_bits(outcomes[1], outcomes[0])
