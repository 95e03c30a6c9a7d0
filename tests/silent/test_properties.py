"""Random federations: whatever the sizes, the cohort, who drops out and the width of numbers, engines agree."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor import algorithms, engines
from fedtailor.core.environment import Environment
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.errors import RoundAbandoned
from fedtailor.models import build
from fedtailor.training.solver import Solver
from tests.helpers import assert_equal, everything, make_data

METHODS = ("fedavg", "fedrep", "ditto", "pfedme", "dr-fedavg", "knn-per", "fedpac", "fedselect", "learn2pfed-net")
SIZES = st.sampled_from([0, 1, 2, 3, 9, 21])


@st.composite
def federations(draw: st.DrawFn) -> dict[str, Any]:
    """Clients with few or many samples, or none; a cohort; probabilities that a reply arrives."""
    sizes = draw(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=2, max_size=5))
    sizes[0] = (max(sizes[0][0], 2), *sizes[0][1:])  # somebody has data
    clients = range(len(sizes))
    cohort = draw(st.lists(st.sampled_from(clients), min_size=1, unique=True))
    return {
        "sizes": {f"client-{i}": size for i, size in enumerate(sizes)},
        "cohort": sorted(cohort),
        "answer": tuple(draw(st.sampled_from([0.5, 1.0])) for _ in clients) if draw(st.booleans()) else (),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
        "batch": draw(st.sampled_from([0, 2, 8])),
        "method": draw(st.sampled_from(METHODS)),
    }


def ran(drawn: dict[str, Any], engine: engines.EngineName) -> tuple[dict[str, Any], list[Any], dict[str, int]]:
    """Everything that two rounds made, who was left out and why, and the traffic."""
    data = make_data(sizes=drawn["sizes"]).to(drawn["dtype"])
    model = build("mlp", data.shape, data.outputs, seed=1, options={"hidden": (5,)}, dtype=drawn["dtype"])
    environment = Environment(seed=3, answer=drawn["answer"])
    solver = Solver(lr=0.05, batch_size=drawn["batch"])
    experiment = Experiment(algorithms.make(drawn["method"], {}), model, data, solver, 3, environment)
    with engines.open_engine(engine, experiment) as made:
        fed = Federation(made)
        server = experiment.algorithm.server_init(model)
        abandoned = []
        for round in (1, 2):
            try:
                server = fed.run_round(round, drawn["cohort"], server)
            except RoundAbandoned as why:
                abandoned.append(str(why))
        faults = sorted((f.client, f.round, f.reason) for f in fed.record.faults)
        traffic = {"up": fed.traffic.up, "down": fed.traffic.down, "trips": fed.traffic.trips}
        return everything(fed, server), [*faults, len(abandoned)], traffic


@settings(max_examples=40)
@given(federations())
def test_engines_agree_on_random_federations(drawn: dict[str, Any]) -> None:
    wanted, faults, traffic = ran(drawn, "loop")
    assert all(torch.isfinite(v).all() for k, v in wanted.items() if k.startswith("server"))
    tolerance = 1e-10 if drawn["dtype"] == torch.float64 else 2e-4
    for engine in ("vmap", "wire"):
        found, also, price = ran(drawn, engine)
        assert_equal(found, wanted, tolerance)
        assert (also, price) == (faults, traffic)
