"""Deep unfolding weights: derivatives, what failures mean, the table that drives the run, the rule of what is seen."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.duw_fedavg import DUWFedAvg
from fedtailor.core.environment import Environment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.training.solver import Solver
from tests.helpers import ENGINES, F64, FULL_BATCH, assert_equal, federate, make_data, make_model

SIZES = torch.tensor([9, 1, 6, 13], dtype=F64)
DUW = DUWFedAvg(epochs=2, horizon=3, outer_iterations=1)


def prepared(algorithm: DUWFedAvg, engine: str = "loop", **options: Any) -> tuple[Federation, Tree]:
    """A federation after its preparing rounds."""
    data = make_data("regression")
    fed = federate(algorithm, data, make_model("mlp", data), engine, options.pop("solver", FULL_BATCH), **options)
    server = algorithm.server_init(fed.engine.experiment.model)
    for round in range(1 - algorithm.preparation, 1):
        server = fed.run_round(round, range(4), server)
    return fed, server


def gradient_of(server: Tree) -> Tensor:
    """Of the only outer iteration: Adam's first average is a tenth of it."""
    return server["learned"]["first"] / 0.1


def outer_loss(theta: Tensor, here: Tensor, *, path: bool, renormalise: bool = False) -> Tensor:
    """T rounds of full-batch descent in one graph; with `path`, local gradients are constants as in the paper."""
    data = make_data("regression")
    model = make_model("mlp", data)
    w: Params = model.params
    total = torch.zeros((), dtype=F64)

    def loss(params: Params, i: int) -> Tensor:
        x, y = data.train.of(i)
        return (model(params, x) - y).square().mean()

    for t in range(3):
        score = theta[t].square() * (here[t] if renormalise else 1)
        share = score / score.sum()
        models = []
        for i in range(4):
            u = w
            for _ in range(2):
                if path:
                    total = total + loss(u, i) * here[t, i]
                    at: Params = {k: v.detach().requires_grad_() for k, v in u.items()}
                    found = torch.autograd.grad(loss(at, i), list(at.values()))
                else:
                    at = {k: v if v.requires_grad else v.requires_grad_() for k, v in u.items()}
                    found = torch.autograd.grad(loss(at, i), list(at.values()), create_graph=True)
                u = {k: u[k] - 0.1 * here[t, i] * g for k, g in zip(at, found, strict=True)}
            models.append(u)
        w = {k: sum(share[i] * models[i][k] for i in range(4)) for k in w}  # type: ignore[misc]
    for i in range(4):
        total = total + 2 * loss(w, i)
    return total


def start() -> Tensor:
    return (SIZES / SIZES.sum()).sqrt().repeat(3, 1)


def drawn(environment: Environment, round: int) -> Tensor:
    found = [environment.answers(round, t, range(4), [9, 1, 6, 13]) for t in range(3)]
    return torch.tensor([[float(c in a) for c in range(4)] for a in found], dtype=F64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("missing", ["", "stale", "renormalise"])
def test_first_order_gradient_is_autograd_of_the_same_objective(missing: Any, engine: str) -> None:
    environment = Environment(seed=5, answer=(0.6,) * 4, missing=missing) if missing else Environment()
    _, server = prepared(DUW, engine, environment=environment)
    here = drawn(environment, 0)
    assert bool((here == 0).any()) == bool(missing)
    theta = start().requires_grad_()
    (wanted,) = torch.autograd.grad(outer_loss(theta, here, path=True, renormalise=missing == "renormalise"), theta)
    torch.testing.assert_close(gradient_of(server), wanted, rtol=0, atol=1e-10)
    assert float(wanted.abs().max()) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_exact_gradient_is_finite_differences(engine: str) -> None:
    environment = Environment(seed=5, answer=(0.6,) * 4, missing="stale")
    _, server = prepared(replace(DUW, gradient="exact", outer="final"), engine, environment=environment)
    found, here, step = gradient_of(server), drawn(environment, 0), 1e-5
    for t in range(3):
        for k in range(4):
            ends = []
            for by in (step, -step):
                theta = start()
                theta[t, k] += by
                ends.append(outer_loss(theta, here, path=False).detach())
            assert float(found[t, k]) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("weights", ["table", "rule"])
@pytest.mark.parametrize("outer", ["path", "final", "holdout"])
def test_learning_lowers_the_outer_loss(outer: Any, weights: Any) -> None:
    algorithm = DUWFedAvg(horizon=3, outer=outer, weights=weights, outer_lr=0.05, outer_iterations=8)
    data = make_data("regression")
    fed = federate(algorithm, data, make_model("mlp", data), "vmap", FULL_BATCH)
    server, losses = algorithm.server_init(fed.engine.experiment.model), []
    for round in range(-7, 1):
        server = fed.run_round(round, range(4), server)
        losses.append(fed.record.reported["outer_loss"])
    assert losses[-1] < losses[0]  # type: ignore[operator]
    after = fed.run_round(1, range(4), server)
    assert abs(sum(fed.record.reported["weights"]) - 1) < 1e-12  # type: ignore[arg-type]
    assert set(after) == set(server)


@pytest.mark.parametrize("missing", ["stale", "renormalise"])
def test_nobody_or_never_or_nothing_is_no_nan(missing: Any) -> None:
    silent = Environment(answer=(0.0,) * 4, missing=missing)
    fed, server = prepared(replace(DUW, outer_iterations=2), environment=silent)
    start_w = server["start"]
    after = fed.run_round(1, range(4), server)
    assert_equal(after["w"], start_w, 0.0)
    never = Environment(answer=(1.0, 0.0, 1.0, 1.0), missing=missing)
    fed, server = prepared(replace(DUW, outer_iterations=3), environment=never)
    zero = server | {"theta": torch.zeros_like(server["theta"])}
    for state in (server, zero):
        made = fed.run_round(1, range(4), state)["w"]
        assert all(bool(torch.isfinite(v).all()) for v in made.values())
    assert bool(torch.isfinite(server["theta"]).all())


def test_what_cannot_be_is_refused() -> None:
    data = make_data("regression")
    with pytest.raises(ConfigError, match="first-order gradient only"):
        replace(DUW, gradient="exact").check(make_model("mlp", data), "regression")
    with pytest.raises(ConfigError, match="statistics move by no gradient"):
        DUW.check(make_model("normed", data, "mean"), "regression")
    with pytest.raises(ConfigError, match="use plain sgd"):
        DUW.check_solver(Solver(lr=0.1, momentum=0.9))


def test_a_rule_goes_on_in_another_federation() -> None:
    learner = DUWFedAvg(horizon=3, outer_iterations=4, outer_lr=0.1, weights="rule")
    fed, server = prepared(learner)
    rule = tuple(fed.record.reported["theta"])  # type: ignore[arg-type]
    assert rule == tuple(server["theta"].tolist())
    assert max(map(abs, rule)) > 0.1
    sizes = {"eve": (5, 0, 0), "fay": (30, 0, 0), "gus": (12, 0, 0), "hal": (7, 0, 0), "ida": (9, 0, 0)}
    data = make_data("regression", sizes=sizes)
    weights = {}
    for given in ((), rule):
        user = replace(learner, outer_iterations=0, theta=given)
        other = federate(user, data, make_model("mlp", data), "loop", FULL_BATCH)
        other.run_round(1, range(5), user.server_init(other.engine.experiment.model))
        weights[given] = torch.tensor(other.record.reported["weights"], dtype=F64)
    n = torch.tensor([5, 30, 12, 7, 9], dtype=F64)
    torch.testing.assert_close(weights[()], n / n.sum())  # without a rule, those of FedAvg
    assert float((weights[rule] - weights[()]).abs().max()) > 0.01
    assert float(weights[rule].sum()) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"algorithm\.theta.*\b1\b.*\b10\b"):
        prepared(replace(learner, theta=(1.0,)))


def test_a_learned_table_drives_other_runs() -> None:
    learner = DUWFedAvg(horizon=3, outer_iterations=4, outer_lr=0.1)
    fed, server = prepared(learner)
    given = tuple(fed.record.reported["theta"])  # type: ignore[arg-type]
    other, _ = prepared(replace(learner, outer_iterations=0, theta=given))
    for federation, state in ((fed, server), (other, learner.server_init(other.engine.experiment.model))):
        federation.run_round(1, range(4), state)
    assert other.record.reported["weights"] == fed.record.reported["weights"]
    with pytest.raises(ConfigError, match=r"algorithm\.theta.*\b2\b.*\b3\b.*\b4\b"):
        prepared(replace(learner, theta=(1.0, 2.0)))


@pytest.mark.parametrize("weights", ["table", "rule"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_without_samples_has_no_say_and_no_nan(engine: str, weights: Any) -> None:
    sizes = {"ada": (9, 3, 4), "bo": (0, 0, 0), "cy": (6, 2, 5)}
    algorithm = DUWFedAvg(horizon=2, outer_iterations=2, weights=weights)
    found = {}
    for names in (tuple(sizes), ("ada", "cy")):
        data = make_data("regression", names, sizes)
        fed = federate(algorithm, data, make_model("mlp", data), engine, FULL_BATCH)
        server = algorithm.server_init(fed.engine.experiment.model)
        for round in (-1, 0, 1):
            server = fed.run_round(round, range(len(names)), server)
        found[names] = server
    assert all(bool(torch.isfinite(v).all()) for v in found[tuple(sizes)]["w"].values())
    if weights == "table":
        assert_equal(found[tuple(sizes)]["w"], found["ada", "cy"]["w"])
