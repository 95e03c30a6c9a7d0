"""SCAFFOLD by hand; the first round is FedAvg's and a client alone is Local; it ends where the common loss is least."""

import pytest
import torch

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.scaffold import SCAFFOLD
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from fedtailor.training.solver import Solver
from tests.helpers import (
    ENGINES,
    F64,
    FULL_BATCH,
    assert_equal,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
)

EQUAL_SIZES = dict.fromkeys(("ada", "bo", "cy", "di"), (6, 2, 2))


def slope(model: Model, params: Params, data: FederatedData, i: int) -> Params:
    x, y = data.train.of(i)
    leaf = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
    output = torch.func.functional_call(model.module, leaf, (x,))
    torch.nn.functional.cross_entropy(output, y).backward()
    return {k: v.grad for k, v in leaf.items()}  # type: ignore[misc]


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_by_hand(engine: str) -> None:
    """Three steps per round; the last round has two of the four clients."""
    data = make_data()
    model = make_model("mlp", data)
    x = model.params
    c = {k: torch.zeros_like(v) for k, v in x.items()}
    own = [c] * 4
    fed = federate(SCAFFOLD(epochs=3, server_lr=0.8), data, model, engine, FULL_BATCH)
    server = fed.engine.experiment.algorithm.server_init(model)
    for round, cohort in enumerate([range(4), range(4), (2, 0)]):
        server = fed.run_round(round, cohort, server)
        moved, changed = [], []
        for i in cohort:
            y = x
            for _ in range(3):
                g = slope(model, y, data, i)
                y = {k: v - 0.1 * (g[k] - own[i][k] + c[k]) for k, v in y.items()}
            new = {k: own[i][k] - c[k] + (x[k] - y[k]) / (3 * 0.1) for k in x}
            moved.append({k: y[k] - x[k] for k in x})
            changed.append({k: new[k] - own[i][k] for k in x})
            own[i] = new
        x = {k: v + 0.8 * torch.stack([m[k] for m in moved]).mean(0) for k, v in x.items()}
        share = len(cohort) / 4
        c = {k: v + share * torch.stack([d[k] for d in changed]).mean(0) for k, v in c.items()}
    assert_equal(server, {"x": x, "c": c})
    assert_equal({n: s["state"] for n, s in states(fed).items()}, dict(zip(data.clients, own, strict=True)))


def test_the_first_round_is_fedavgs() -> None:
    data = make_data(sizes=EQUAL_SIZES)
    ours, plain = (federate(a, data, make_model("mlp", data)) for a in (SCAFFOLD(epochs=2), FedAvg(epochs=2)))
    assert_equal(run(ours, 1)["x"], run(plain, 1))
    assert max(float((run(ours)["x"][k] - v).abs().max()) for k, v in run(plain).items()) > 1e-4


def away_from_the_minimum(algorithm: Algorithm, rounds: int) -> float:
    """Of the clients' mean loss, for a linear model."""
    data = make_data("regression", sizes=EQUAL_SIZES)
    ones = torch.ones(24, 1, dtype=F64)
    best = torch.linalg.lstsq(torch.cat([data.train.x, ones], 1), data.train.y).solution
    fed = federate(algorithm, data, make_model("linear", data), "vmap", FULL_BATCH)
    w = models(fed, run(fed, rounds))["ada"]
    return float((torch.cat([w["out.weight"].T, w["out.bias"][None]]) - best).abs().max())


def test_it_ends_where_the_common_loss_is_least() -> None:
    """FedAvg with several local steps ends elsewhere: each client pulls to its own minimum."""
    assert away_from_the_minimum(SCAFFOLD(epochs=5), 150) < 1e-5
    assert away_from_the_minimum(FedAvg(epochs=5), 150) > 1e-2


def test_other_steps_than_plain_ones_are_refused() -> None:
    for solver in (Solver(optimizer="adam"), Solver(momentum=0.9), Solver(clip=1.0)):
        with pytest.raises(ConfigError, match="SCAFFOLD"):
            SCAFFOLD().check_solver(solver)
