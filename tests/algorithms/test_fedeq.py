"""FeDEQ by hand, with its dual switched off, and what its two averages converge to."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

from fedtailor.algorithms import make
from fedtailor.algorithms.fedeq import FeDEQ
from fedtailor.core.client import onboard
from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.random import torch_stream
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from fedtailor.training.solver import Solver
from tests.helpers import (
    F64,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)

COHORTS = ([0, 1, 2, 3], [0, 2], [0, 1, 3])  # 0 is there each time; 1 and 3 were away once, 2 is at the end
SIZES = [9, 1, 6, 13]


class Smooth(nn.Module):
    """A net with a bounded curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.softplus(self.body(x)))


def smooth() -> Model:
    with torch_stream("smooth"):
        return Model(Smooth().to(F64), head=["out"])


def lagrangian(model: Model, x: Tensor, y: Tensor, theta_i: Params, w: Params, dual: Params, theta: Params, rho: float):
    """(5), with lambda as it stands in the paper."""
    loss = nn.functional.mse_loss(torch.func.functional_call(model.module, theta_i | w, (x,)), y)
    apart = {k: theta_i[k] - theta[k] for k in theta}
    return loss + sum((dual[k] * d).sum() + rho / 2 * d.square().sum() for k, d in apart.items())


def by_hand(data: FederatedData, model: Model, algorithm: FeDEQ) -> tuple[Params, list[dict[str, Params]], list[float]]:
    """Algorithm 1: the common representation, each client's (theta_i, w, lambda), and the Lagrangian of each round."""
    rho, theta = algorithm.rho, model.body
    zero = {k: torch.zeros_like(v) for k, v in theta.items()}
    clients = [{"theta": theta, "w": model.head, "lambda": zero} for _ in range(4)]
    before: list[int] = []
    told = []
    for cohort in COHORTS:
        sent, total = [], 0.0
        for i in cohort:
            x, y = data.train.of(i)
            own = algorithm.start == "own" or (algorithm.start == "recent" and i in before)
            theta_i, dual = clients[i]["theta"] if own else theta, clients[i]["lambda"]
            under = theta if algorithm.head_on == "common" else theta_i
            w, joint = clients[i]["w"], algorithm.phases == "joint"
            w = w if joint else descend(model, w, x, y, steps=algorithm.head_epochs, frozen=under)
            for _ in range(algorithm.epochs):
                slopes = torch.func.grad(lagrangian, argnums=(3, 4))(model, x, y, theta_i, w, dual, theta, rho)
                theta_i = {k: v - 0.1 * slopes[0][k] for k, v in theta_i.items()}
                w = {k: v - 0.1 * slopes[1][k] for k, v in w.items()} if joint else w
            dual = {k: dual[k] + rho * (theta_i[k] - theta[k]) for k in theta}
            total += float(lagrangian(model, x, y, theta_i, w, dual, theta, rho))
            clients[i] = {"theta": theta_i, "w": w, "lambda": dual}
            exact = algorithm.average == "exact"
            sent.append({k: v + dual[k] / rho for k, v in theta_i.items()} if exact else theta_i)
        theta = weighted(sent, [SIZES[i] if algorithm.mean == "samples" else 1 for i in cohort])
        told.append(total)
        before = cohort
    return theta, clients, told


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"phases": "joint"},
        {"phases": "joint", "average": "exact", "serve": "own"},
        {"average": "exact", "mean": "clients", "start": "own", "head_on": "start"},
        {"preset": "paper", "dual_start": 0.0},
        {"preset": "released"},
    ],
)
def test_rounds_by_hand(options: dict[str, Any]) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    algorithm = make("fedeq", options | {"head_epochs": 2, "epochs": 3, "rho": 0.5, "diagnostics": True})
    assert isinstance(algorithm, FeDEQ)
    theta, clients, told = by_hand(data, model, algorithm)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    server = model.body
    for number, cohort in enumerate(COHORTS):
        server = fed.run_round(number, cohort, server)
        assert fed.record.reported["augmented_lagrangian"] == pytest.approx(told[number], abs=1e-10)
    assert_equal(server, theta)
    for mine, (name, found) in zip(clients, states(fed).items(), strict=True):
        assert_equal({k: found["state"][k] for k in ("theta", "w")}, {k: mine[k] for k in ("theta", "w")})
        assert_equal({k: 0.5 * u for k, u in found["state"]["u"].items()}, mine["lambda"])
        served = theta if algorithm.serve == "common" else mine["theta"]
        assert_equal(models(fed, server)[name], served | mine["w"])


@pytest.mark.parametrize("names", [("ada", "cy", "di"), ("ada",)])
@pytest.mark.parametrize("average", ["exact", "plain"])
def test_where_it_ends(average: Any, names: tuple[str, ...]) -> None:
    rho = 1.0  # least squares without a head; every client solves its part almost exactly
    sizes = {"ada": (20, 0, 0), "cy": (12, 0, 0), "di": (13, 0, 0)}
    data = make_data("regression", names=names, sizes=sizes, outputs=2)
    model = Model(make_model("linear", data).module)
    algorithm = FeDEQ(epochs=15, rho=rho, average=average, start="own", mean="clients")
    fed = federate(algorithm, data, model, "vmap", solver=Solver(lr=0.25, batch_size=0))
    theta = run(fed, rounds=60)

    def risk(theta: Params) -> Tensor:
        parts = [data.train.of(i) for i in range(len(names))]
        return torch.stack([nn.functional.mse_loss(model(theta, x), y) for x, y in parts]).mean()

    slope = torch.func.grad(risk)(theta)
    if average == "plain":  # the sum of the duals telescopes to rho (theta - start): a pull back that never ends
        slope = {k: v + rho * (theta[k] - model.params[k]) for k, v in slope.items()}
    assert_equal(slope, {k: torch.zeros_like(v) for k, v in slope.items()}, 1e-5)
    for mine in states(fed).values():
        assert_equal(mine["state"]["theta"], theta, 1e-5)  # consensus


@pytest.mark.parametrize("average", ["exact", "plain"])
def test_theorem_4_5(average: Any) -> None:
    """With rho > 6 L the augmented Lagrangian falls in every round, stays above 0, and the copies come to agree."""
    data, model = make_data("regression", outputs=2), smooth()
    curvature = max(bound(data, model, i, model.params) for i in range(4))
    rho = 13 * curvature  # leaves room: it grows a little on the way
    one = {"head_epochs": 1, "epochs": 1}
    where = {"start": "own", "head_on": "start", "mean": "clients", "serve": "own"}
    algorithm = make("fedeq", one | where | {"rho": rho, "average": average, "diagnostics": True})
    fed = federate(algorithm, data, model, solver=Solver(lr=1 / (curvature + rho), batch_size=0))
    server, told = algorithm.server_init(model), []
    for number in range(150):
        server = fed.run_round(number, range(4), server)
        told.append((fed.record.reported["augmented_lagrangian"], fed.record.reported["consensus_residual"]))
    values, residuals = zip(*told, strict=True)
    assert all(later < earlier for earlier, later in pairwise(values))
    assert min(values) > 0
    assert residuals[-1] < residuals[0] / 100
    assert max(bound(data, model, i, server | s["state"]["w"]) for i, s in enumerate(states(fed).values())) < rho / 6


def bound(data: FederatedData, model: Model, client: int, params: Params) -> float:
    """The largest curvature of a client's loss at some point."""
    x, y = data.train.of(client)
    shapes = {k: v.shape for k, v in params.items()}

    def loss(flat: Tensor) -> Tensor:
        parts = zip(shapes, flat.split([s.numel() for s in shapes.values()]), strict=True)
        return nn.functional.mse_loss(model({k: v.reshape(shapes[k]) for k, v in parts}, x), y)

    flat = torch.cat([v.flatten() for v in params.values()])
    return float(torch.linalg.eigvalsh(hessian(loss, flat)).abs().max())


def test_a_random_dual() -> None:
    data = make_data()
    fed = federate(FeDEQ(dual_start=0.01, rho=0.5), data, make_model("mlp", data))
    drawn = torch.stack(
        [0.5 * torch.cat([v.flatten() for v in s["state"]["u"].values()]) for s in states(fed).values()]
    )
    assert 0.009 < float(drawn.abs().max()) <= 0.01
    assert len(drawn.unique()) == drawn.numel()


@pytest.mark.parametrize("options", [{"rho": -1.0}, {"rho": 0.0, "dual_start": 0.1}])
def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    data = make_data()
    with pytest.raises(ConfigError, match=r"algorithm\.rho"):
        make("fedeq", options).check(make_model("mlp", data), data.task)


@pytest.mark.parametrize("preset", ["paper", "released", None])
def test_a_newcomer_fits_a_head_to_the_common_representation(preset: str | None) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    fed = federate(make("fedeq", {"preset": preset} if preset else {}), data, model, solver=FULL_BATCH)
    theta = run(fed, cohort=[0, 1])
    head = descend(model, model.head, *data.train.of(3), steps=4, frozen=theta)
    assert_equal(onboard(fed.engine.experiment, 3, theta, 4), theta | head)


class Sum(nn.Module):
    """Representation and head both linear: one curvature everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)
        self.out = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.out(x[:, :2] - x[:, 2:])


def linear_task() -> tuple[FederatedData, Model, float]:
    """Four clients, their model, and the largest curvature L."""
    sizes = {"ada": (20, 0, 0), "cy": (12, 0, 0), "di": (13, 0, 0), "ed": (16, 0, 0)}
    data = make_data("regression", sizes=sizes, outputs=2)
    with torch_stream("sum"):
        model = Model(Sum().to(F64), head=["out"])
    return data, model, max(bound(data, model, i, model.params) for i in range(4))


def squares(a: Params, b: Params) -> float:
    return sum(float((a[k] - b[k]).square().sum()) for k in a)


@pytest.mark.parametrize("cohorts", [[range(4)], [(0, 3), (1, 2)], [(2,), (0,), (3,), (1,)]], ids=["all", "two", "one"])
def test_lemmas_4_2_and_4_4_under_sampling(cohorts: list[tuple[int, ...]]) -> None:
    """(7) and (21), with rho > 6 L.

    After T rounds, in which each client took part, the Lagrangian of all has fallen at least so far. It is at least the
    loss of the common representation and (rho - 5 L) / 2 times the distances to it.
    """
    data, model, curvature = linear_task()
    rho = 6.5 * curvature
    options = {"preset": "paper", "dual_start": 0.0, "rho": rho, "head_epochs": 1, "epochs": 1}
    fed = federate(make("fedeq", options), data, model, "vmap", Solver(lr=1 / (curvature + rho), batch_size=0))
    theta = fed.engine.experiment.algorithm.server_init(model)
    samples = [data.train.of(i) for i in range(4)]

    def looked_at() -> tuple[float, Params, list[dict[str, Params]]]:
        clients, total = [s["state"] for s in states(fed).values()], 0.0
        for (x, y), s in zip(samples, clients, strict=True):
            dual = {k: rho * v for k, v in s["u"].items()}
            total += float(lagrangian(model, x, y, s["theta"], s["w"], dual, theta, rho))
        return total, theta, clients

    before = looked_at()
    for block in range(12):
        for t, cohort in enumerate(cohorts):
            theta = fed.run_round(block * len(cohorts) + t, cohort, theta)
        after = looked_at()
        bound_of_fall = 0.0
        for new, old in zip(after[2], before[2], strict=True):
            bound_of_fall -= (rho / 2 - 3 * curvature**2 / rho) * squares(after[1], before[1])
            bound_of_fall -= ((curvature + rho) / 2 - 12 * curvature**2 / rho) * squares(new["theta"], old["theta"])
            bound_of_fall -= (curvature / 2 - 3 * curvature**2 / rho) * squares(new["w"], old["w"])
        assert after[0] - before[0] <= bound_of_fall / len(cohorts) < 0
        losses = sum(
            float(nn.functional.mse_loss(model(theta | s["w"], x), y))
            for (x, y), s in zip(samples, after[2], strict=True)
        )
        apart = sum(squares(s["theta"], theta) for s in after[2])
        assert after[0] >= losses + (rho - 5 * curvature) / 2 * apart
        before = after


@pytest.mark.parametrize("cohorts", [[range(4)], [(0, 1), (2, 3)]], ids=["all", "two"])
def test_theorem_4_6(cohorts: list[tuple[int, ...]]) -> None:
    """The limit is stationary: grad F_i + lambda_i = 0, the head's gradient is 0, and the copies agree."""
    data, model, curvature = linear_task()
    rho = 6.5 * curvature
    options = {"preset": "paper", "dual_start": 0.0, "rho": rho, "head_epochs": 10, "epochs": 10}
    fed = federate(make("fedeq", options), data, model, "vmap", Solver(lr=1 / (curvature + rho), batch_size=0))
    theta = fed.engine.experiment.algorithm.server_init(model)
    for number in range(65 * len(cohorts)):
        theta = fed.run_round(number, cohorts[number % len(cohorts)], theta)
    for i, mine in enumerate(s["state"] for s in states(fed).values()):
        x, y = data.train.of(i)

        def loss(body: Params, head: Params, x: Tensor = x, y: Tensor = y) -> Tensor:
            return nn.functional.mse_loss(model(body | head, x), y)

        by_theta, by_w = torch.func.grad(loss, argnums=(0, 1))(theta, mine["w"])
        assert_equal({k: -rho * u for k, u in mine["u"].items()}, by_theta, 1e-6)
        assert_equal(by_w, {k: torch.zeros_like(v) for k, v in by_w.items()}, 1e-6)
        assert_equal(mine["theta"], theta, 1e-6)
        assert max(float((rho * u).abs().max()) for u in mine["u"].values()) > 0.1  # clients pull apart
