"""MOCHA by hand, with dual variables of every sample; with independent tasks it is ridge regression of each alone."""

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.mocha import MOCHA
from fedtailor.core.data import FederatedData
from fedtailor.errors import ConfigError
from tests.helpers import F64, assert_equal, federate, make_data, make_model, models, run, states

LAM = 0.05


def design(data: FederatedData, i: int) -> tuple[Tensor, Tensor]:
    x, y = data.train.of(i)
    return torch.cat([x, torch.ones(len(x), 1, dtype=F64)], 1), y


def relations(columns: list[Tensor], floor: float) -> Tensor:
    w = torch.stack([c.flatten() for c in columns], 1)
    alone = torch.eye(len(columns), dtype=F64) / len(columns)
    if float(w.abs().max()) == 0:
        return alone
    s, q = torch.linalg.eigh(w.T @ w)
    root = q @ torch.diag(s.clamp(min=0).sqrt()) @ q.T
    return (1 - floor) * root / root.trace() + floor * alone


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    """The dual problem as the paper has it: a variable for every sample, a linear system for every client."""
    data = make_data("regression")
    w = [torch.zeros(5, 3, dtype=F64)] * 4
    alpha = [torch.zeros(len(data.train.of(i)[0]), 3, dtype=F64) for i in range(4)]
    for _ in range(3):
        sigma = relations(w, 0.2)
        rho = max(float(sigma[t].abs().sum() / sigma[t, t]) for t in range(4))

        def combined(sigma: Tensor = sigma) -> list[Tensor]:
            b = [design(data, t)[0].T @ alpha[t] / len(alpha[t]) for t in range(4)]
            return [torch.stack([sigma[t, s] * b[s] for s in range(4)]).sum(0) / LAM for t in range(4)]

        w = combined()
        for _ in range(2):
            for t in range(4):
                x, y = design(data, t)
                n = len(x)
                system = torch.eye(n, dtype=F64) + rho * sigma[t, t] / (LAM * n) * x @ x.T
                alpha[t] = alpha[t] + torch.linalg.solve(system, y - alpha[t] - x @ w[t])
            w = combined()
    fed = federate(MOCHA(cells=2, lam=LAM, floor=0.2), data, make_model("linear", data), engine)
    server = run(fed, rounds=3)
    assert_equal(server["W"], torch.stack(w, -1))
    wanted = {name: {"out.weight": w[t][:-1].T, "out.bias": w[t][-1]} for t, name in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted)


def test_independent_tasks_are_ridge_regression() -> None:
    data = make_data("regression")
    fed = federate(MOCHA(cells=1, lam=LAM, floor=1.0), data, make_model("linear", data))
    server = run(fed, rounds=1)
    for t in range(4):
        x, y = design(data, t)
        n = len(x)
        wanted = torch.linalg.solve(x.T @ x / n + 4 * LAM * torch.eye(5, dtype=F64), x.T @ y / n)
        assert_equal(server["W"][..., t], wanted)


def test_it_ends_where_the_objective_is_stationary() -> None:
    data = make_data("regression")
    fed = federate(MOCHA(cells=20, lam=LAM, floor=0.3), data, make_model("linear", data), "vmap")
    server = run(fed, rounds=60)
    w = [server["W"][..., t] for t in range(4)]
    omega = torch.linalg.inv(relations(w, 0.3))
    for t in range(4):
        x, y = design(data, t)
        slope = x.T @ (x @ w[t] - y) / len(x) + LAM * torch.stack([omega[t, s] * w[s] for s in range(4)]).sum(0)
        assert float(slope.abs().max()) < 1e-6


def test_related_tasks_lean_on_each_other() -> None:
    """A client with a single sample gets a model from the others, which it does not get alone."""
    data = make_data("regression")
    apart = {}
    for floor in (1.0, 0.1):
        fed = federate(MOCHA(cells=20, lam=LAM, floor=floor), data, make_model("linear", data))
        server = run(fed, rounds=5)
        x, _ = design(data, 1)
        rest = torch.eye(5, dtype=F64) - x.T @ x / (x @ x.T)  # directions that its sample does not show
        apart[floor] = float((rest @ server["W"][..., 1]).abs().max())
    assert apart[1.0] < 1e-12
    assert apart[0.1] > 1e-3


def test_absent_clients_keep_the_model_they_got() -> None:
    data = make_data("regression")
    fed = federate(MOCHA(), data, make_model("linear", data))
    server = run(fed, rounds=2)
    before = states(fed)
    after = fed.run_round(2, [0, 3], server)
    assert_equal(states(fed)["bo"], before["bo"], 0)
    assert_equal(after["B"][..., [1, 2]], server["B"][..., [1, 2]], 0)
    assert fed.record.gathered == {"dual variables of each client"}


def test_mistakes() -> None:
    data = make_data("regression")
    with pytest.raises(ConfigError, match="linear models in closed form"):
        MOCHA().check(make_model("mlp", data), "regression")
    with pytest.raises(ConfigError, match="for regression, not classification"):
        MOCHA().check(make_model("linear", data), "classification")
    for wrong in (MOCHA(lam=0.0), MOCHA(floor=1.5), MOCHA(cells=0)):
        with pytest.raises(ConfigError, match="MOCHA needs lam above 0"):
            wrong.check(make_model("linear", data), "regression")
