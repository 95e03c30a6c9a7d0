"""FedNova, DR-FedAvg, FedAdp and FedFa: a round by hand each, and where they are FedAvg."""

from dataclasses import replace
from math import acos, exp, log2
from typing import Any

import pytest
import torch

from fedtailor.algorithms.dr_fedavg import DRFedAvg
from fedtailor.algorithms.duw_fednova import DUWFedNova
from fedtailor.algorithms.fedadp import FedAdp
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedfa import FedFa
from fedtailor.algorithms.fednova import FedNova
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.environment import Environment
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.training.solver import Solver
from tests.helpers import EVEN_SIZES, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, run, weighted

N = [9, 1, 6, 13]


def trained(steps: list[int], kind: Any = "regression") -> tuple[Params, list[Params]]:
    data = make_data(kind)
    model = make_model("mlp", data)
    return model.params, [descend(model, model.params, *data.train.of(i), steps=s) for i, s in enumerate(steps)]


def one_round(algorithm: Algorithm, kind: Any = "regression", **options: Any) -> Tree:
    data = make_data(kind)
    fed = federate(algorithm, data, make_model("mlp", data), solver=FULL_BATCH, **options)
    return fed.run_round(1, range(4), algorithm.server_init(fed.engine.experiment.model))


def test_fednova_by_hand() -> None:
    w, models = trained([2, 6, 4, 2])
    found = one_round(FedNova(epochs=2), environment=Environment(epochs=(1, 3, 2, 1)))
    p = [n / 29 for n in N]
    tau = [2, 6, 4, 2]
    effective = sum(p[i] * tau[i] for i in range(4))
    wanted = {k: v - effective * sum(p[i] * (v - models[i][k]) / tau[i] for i in range(4)) for k, v in w.items()}
    assert_equal(found, wanted)


def test_fednova_with_momentum_weighs_the_steps_as_the_paper() -> None:
    """|a|_1 by running momentum on a constant gradient of 1."""
    data = make_data("regression")
    solver = Solver(lr=0.1, momentum=0.9, batch_size=0)
    fed = federate(FedNova(epochs=3), data, make_model("mlp", data), solver=solver)
    speed = moved = 0.0
    for _ in range(3):
        speed = 0.9 * speed + 1
        moved += speed
    plain = federate(FedAvg(epochs=3), data, make_model("mlp", data), solver=solver)
    assert_equal(run(fed, 1), run(plain, 1))  # equal steps: FedAvg
    _, by, times = fed.map(fed.engine.experiment.algorithm.local, fed.engine.experiment.model.params)  # type: ignore[attr-defined]
    torch.testing.assert_close(
        fed.gather(times, "times") / torch.tensor(N), torch.full((4,), moved, dtype=torch.float64)
    )
    torch.testing.assert_close(fed.gather(by, "by") / torch.tensor(N), torch.full((4,), 1 / moved, dtype=torch.float64))
    with pytest.raises(ConfigError, match="steps of sgd"):
        FedNova().check_solver(Solver(optimizer="adam"))


@pytest.mark.parametrize("missing", ["stale", "renormalise"])
def test_duw_fednova_by_hand(missing: Any) -> None:
    """Algorithm 5, line 3: every step is eta tau_eff / tau, and the models are averaged; one client does not answer."""
    environment = Environment(epochs=(1, 3, 2, 1), answer=(1, 0, 1, 1), missing=missing)
    found = one_round(DUWFedNova(outer_iterations=0, epochs=2), environment=environment)["w"]
    data = make_data("regression")
    model = make_model("mlp", data)
    counted = [0, 1, 2, 3] if missing == "stale" else [0, 2, 3]
    tau_eff = (9 * 2 + 6 * 4 + 13 * 2) / sum(N[i] for i in counted)
    each = {1: model.params}
    for i, tau in {0: 2, 2: 4, 3: 2}.items():
        each[i] = descend(model, model.params, *data.train.of(i), steps=tau, lr=0.1 * tau_eff / tau)
    assert_equal(found, weighted([each[i] for i in counted], [N[i] for i in counted]))
    scaled_at_the_end = one_round(FedNova(epochs=2), environment=environment)
    apart = max(float((found[k] - v).abs().max()) for k, v in scaled_at_the_end.items())
    assert apart > 1e-3  # the gradients are taken elsewhere


def test_duw_fednova_with_momentum() -> None:
    """(5): a step's gradient weighs (1 - .9^left) / .1, and |a|_1 is the sum of these."""
    data = make_data("regression")
    algorithm, tau = DUWFedNova(outer_iterations=0, outer="final"), (1, 3, 2, 1)
    solver = Solver(lr=0.1, momentum=0.9, batch_size=0)
    fed = federate(algorithm, data, make_model("mlp", data), solver=solver, environment=Environment(epochs=tau))
    model = fed.model
    found = fed.run_round(1, range(4), algorithm.server_init(model))["w"]
    a = [[sum(0.9**j for j in range(t - s)) for s in range(t)] for t in tau]
    tau_eff = sum(n * sum(one) / 29 for n, one in zip(N, a, strict=True))
    each = []
    for i, weights in enumerate(a):
        x, y = data.train.of(i)
        w, speed = model.params, {k: torch.zeros_like(v) for k, v in model.params.items()}
        for _ in weights:
            slope = torch.func.grad(lambda u, x=x, y=y: (model(u, x) - y).square().mean())(w)
            speed = {k: 0.9 * v + slope[k] for k, v in speed.items()}
            w = {k: v - 0.1 * tau_eff / sum(weights) * speed[k] for k, v in w.items()}
        each.append(w)
    assert_equal(found, weighted(each, N))


@pytest.mark.parametrize(("q", "summed"), [(1.0, False), (0.5, True)])
def test_dr_fedavg_by_hand(q: float, summed: bool) -> None:
    _, models = trained([2, 2, 2, 2])
    data = make_data("regression")
    model = make_model("mlp", data)
    losses = []
    for i in range(4):
        x, y = data.train.of(i)
        losses.append(float((model(model.params, x) - y).square().mean()) * (2 if summed else 1))
    weights = [n * f ** (q + 1) for n, f in zip(N, losses, strict=True)]
    found = one_round(DRFedAvg(epochs=2, q=q, summed=summed))
    assert_equal(found, weighted(models, weights))
    assert_equal(one_round(DRFedAvg(q=-1.0)), one_round(FedAvg()))


def test_fedadp_by_hand() -> None:
    w, models = trained([1, 1, 1, 1])
    moves = [torch.cat([(m[k] - w[k]).flatten() for k in w]) for m in models]
    mean = sum(n / 29 * m for n, m in zip(N, moves, strict=True))
    angles = [acos(float(torch.dot(m, mean) / (m.norm() * mean.norm()))) for m in moves]  # type: ignore[union-attr, arg-type]
    weights = [n * exp(5 * (1 - exp(-exp(-5 * (a - 1))))) for n, a in zip(N, angles, strict=True)]
    server = one_round(FedAdp())
    assert_equal(server["w"], weighted(models, weights))  # type: ignore[arg-type]
    torch.testing.assert_close(server["angles"], torch.tensor(angles, dtype=torch.float64))


def test_fedfa_by_hand() -> None:
    _, models = trained([3, 3, 3, 3], "classification")
    data = make_data()
    model = make_model("mlp", data)
    right = []
    for i, m in enumerate(models):
        x, y = data.train.of(i)
        right.append(max(float((model(m, x).argmax(-1) == y).double().mean()), 1e-6))
    a = [-log2(r / sum(right)) for r in right]
    weights = [0.5 * v / sum(a) + 0.5 / 4 for v in a]  # all took part once
    assert_equal(one_round(FedFa(epochs=3), "classification")["w"], weighted(models, weights), 1e-6)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="for classification, not regression"):
        FedFa().check(model, "regression")


@pytest.mark.parametrize("kind", [FedNova, DUWFedNova])
def test_statistics_are_averaged_and_not_scaled(kind: type[Algorithm]) -> None:
    """A client with many steps scales moves up; a variance moved beyond the mean may be negative."""
    data = make_data(sizes={"many": (200, 2, 2), "a": (4, 2, 2), "b": (4, 2, 2)})
    data = replace(data, train=replace(data.train, x=0.1 * data.train.x))
    algorithm: Any = kind(outer="holdout", outer_iterations=0) if kind is DUWFedNova else kind()
    fed = federate(algorithm, data, make_model("normed", data, "mean"), solver=Solver(lr=0.05, batch_size=4))
    server: Any = run(fed, 1)
    assert (server.get("w", server)["norm.running_var"] > 0).all()


def test_the_angle_of_fedadp_is_of_what_is_trained() -> None:
    data = make_data(sizes=EVEN_SIZES)
    private, mean = (run(federate(FedAdp(), data, make_model("normed", data, p)), 1) for p in ("private", "mean"))
    assert_equal(mean["angles"], private["angles"])
