"""Every algorithm gives the same on every engine, whoever stands where in the list of clients."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fedtailor.core.federation import Federation
from fedtailor.core.trees import items, tree_map
from fedtailor.local.training import Solver
from tests.helpers import (
    EVEN_SIZES,
    FULL_BATCH,
    IN_PROCESS,
    OTHERS,
    SIZES,
    SOLVER,
    assert_equal,
    everything,
    federate,
    make_data,
    make_model,
    run,
    states,
    suits,
    usual,
    variants,
)

CASES: dict[str, dict[str, Any]] = {
    "classification": {},
    "regression": {"task": "regression"},
    "linear": {"model": "linear", "task": "regression"},
    "momentum-decay-clip": {"solver": replace(SOLVER, momentum=0.9, weight_decay=0.01, clip=0.5)},
    "adam": {"solver": Solver(optimizer="adam", lr=0.01, batch_size=4)},
    "full-batch": {"solver": FULL_BATCH},
    "batchnorm-private": {"model": "normed", "sizes": EVEN_SIZES},
    "batchnorm-mean": {"model": "normed", "sizes": EVEN_SIZES, "buffers": "mean"},
    "conv": {"model": "conv", "shape": (1, 6, 6)},
    "one-client": {"names": ("ada",)},
    "one-sample": {"names": ("bo",)},
    "linear-one-client": {"model": "linear", "task": "regression", "names": ("ada",)},
    "linear-one-sample": {"model": "linear", "task": "regression", "names": ("bo",)},
}
VARIANTS = variants()
every_algorithm = pytest.mark.parametrize("algorithm", VARIANTS)
every_case = pytest.mark.parametrize(
    ("algorithm", "case"), [(a, c) for a, kind in VARIANTS.items() for c, case in CASES.items() if suits(kind, case)]
)


def federation(algorithm: str, engine: str, case: dict[str, Any]) -> Federation:
    case = dict(case)
    model, buffers = case.pop("model", "mlp"), case.pop("buffers", "private")
    solver = case.pop("solver", SOLVER)
    data = make_data(**case)
    return federate(VARIANTS[algorithm], data, make_model(model, data, buffers), engine, solver)


def outcome(algorithm: str, engine: str, case: dict[str, Any]) -> dict[str, Any]:
    fed = federation(algorithm, engine, case)
    server = run(fed)
    assert fed.faults == []
    return everything(fed, server)


@cache
def reference(algorithm: str, case: str) -> dict[str, Any]:
    return outcome(algorithm, "loop", CASES[case])


@pytest.mark.parametrize("engine", OTHERS)
@every_case
def test_engines_agree(algorithm: str, case: str, engine: str) -> None:
    assert_equal(outcome(algorithm, engine, CASES[case]), reference(algorithm, case))


@every_case
def test_the_reference_learns(algorithm: str, case: str) -> None:
    # else equal results could be the results of nothing happening
    before, after = federation(algorithm, "loop", CASES[case]).engine.setting.model.params, reference(algorithm, case)
    for client in CASES[case].get("names", SIZES):
        assert max(float((after[f"models/{client}/{k}"] - v).abs().max()) for k, v in before.items()) > 1e-3


@pytest.mark.parametrize("engine", ["loop", "vmap2"])
@every_algorithm
def test_order_of_clients_is_irrelevant(algorithm: str, engine: str) -> None:
    case = usual(VARIANTS[algorithm])
    turned = outcome(algorithm, engine, case | {"names": ("di", "bo", "ada", "cy")})
    assert_equal(turned, outcome(algorithm, "loop", case))


@pytest.mark.parametrize("engine", IN_PROCESS)
@every_algorithm
def test_absent_clients_are_untouched(algorithm: str, engine: str) -> None:
    case = {"model": "normed", "sizes": EVEN_SIZES}
    normed = suits(VARIANTS[algorithm], case)
    fed = federation(algorithm, engine, case if normed else usual(VARIANTS[algorithm]))
    before = states(fed)
    run(fed, cohort=[0, 2])
    after = states(fed)
    for name in ("bo", "di"):
        for (path, old), (_, new) in zip(items(before[name]), items(after[name]), strict=True):
            assert torch.equal(old, new), path
    for name in ("ada", "cy") if normed else ():  # whose BatchNorm statistics at least have moved
        assert not all(
            torch.equal(old, new) for (_, old), (_, new) in zip(items(before[name]), items(after[name]), strict=True)
        )


@pytest.mark.parametrize("engine", IN_PROCESS)
@every_algorithm
def test_a_part_of_the_clients_is_as_a_federation_of_that_part(algorithm: str, engine: str) -> None:
    if VARIANTS[algorithm].preparation:
        pytest.skip("what is learned before the run depends on who there is")
    case = usual(VARIANTS[algorithm])
    fed = federation(algorithm, engine, case)
    server = run(fed, cohort=[0, 2])
    alone = federation(algorithm, "loop", case | {"names": ("ada", "cy")})
    server_alone = run(alone)
    found, wanted = everything(fed, server), everything(alone, server_alone)
    assert_equal({k: found[k] for k in wanted}, wanted)


@pytest.mark.parametrize("engine", IN_PROCESS)
@every_algorithm
def test_saved_states_continue_as_the_straight_run(algorithm: str, engine: str) -> None:
    case = usual(VARIANTS[algorithm])
    straight = federation(algorithm, engine, case)
    clients = range(4)
    server = straight.engine.setting.algorithm.server_init(straight.engine.setting.model)
    server = straight.run_round(0, clients, server)
    saved = tree_map(torch.clone, straight.engine.get_states())
    fresh = federation(algorithm, engine, case)
    fresh.engine.set_states(saved)
    wanted = everything(straight, straight.run_round(1, clients, server))
    assert_equal(everything(fresh, fresh.run_round(1, clients, server)), wanted, tolerance=0)
