"""Deep unfolding weights: derivatives, what failures mean, the table that drives the run, the rule of what is seen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms._shared.duw import DUW as DUWBase
from fedtailor.algorithms.duw_fedavg import DUWFedAvg
from fedtailor.algorithms.duw_fednova import DUWFedNova
from fedtailor.algorithms.fednova import FedNova
from fedtailor.core.environment import Environment
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import Limits
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.training.solver import Solver
from tests.helpers import ENGINES, F64, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, run

SIZES = torch.tensor([9, 1, 6, 13], dtype=F64)
DUW = DUWFedAvg(epochs=2, horizon=3, outer_iterations=1)
NOVA = DUWFedNova(epochs=2, horizon=3, outer_iterations=1)
UNEQUAL = (1, 3, 2, 1)  # passes for each that is asked for
Gradients = dict[tuple[int, int, int], list[Tensor]]  # by round, client and step


def prepared(algorithm: DUWBase, engine: str = "loop", **options: Any) -> tuple[Federation, Tree]:
    """A federation after its preparing rounds."""
    data = make_data("regression")
    fed = federate(algorithm, data, make_model("mlp", data), engine, options.pop("solver", FULL_BATCH), **options)
    server = algorithm.server_init(fed.engine.experiment.model)
    for round in range(1 - algorithm.preparation, 1):
        server = fed.run_round(round, range(4), server)
    assert fed.record.faults == []
    return fed, server


def gradient_of(server: Tree) -> Tensor:
    """Of the only outer iteration: Adam's first average is a tenth of it."""
    return server["learned"]["first"] / 0.1


def rates_of(steps: list[int], here: Tensor, *, renormalise: bool) -> list[float]:
    """Algorithm 5, line 3: eta tau_eff / tau of each client; who does not answer takes no steps."""
    taken = sum(float(n * h) * s for n, h, s in zip(SIZES, here, steps, strict=True))
    tau_eff = taken / float((SIZES * here).sum() if renormalise else SIZES.sum())
    return [0.1 * tau_eff / s for s in steps]


def outer_loss(
    theta: Tensor,
    here: Tensor,
    *,
    path: bool,
    renormalise: bool = False,
    nova: bool = False,
    w: Params | None = None,
    gradients: Gradients | None = None,
    all_clients: bool = True,
) -> Tensor:
    """T rounds of full-batch descent in one graph; with `path`, local gradients are constants as in the paper.

    These are written to `gradients`, or, where they are there already, taken from it. Losses are those of all clients,
    at the common model if their update fails.
    """
    data = make_data("regression")
    model = make_model("mlp", data)
    w = model.params if w is None else w
    total = torch.zeros((), dtype=F64)
    steps = [2 * e if nova else 2 for e in UNEQUAL]
    gradients = {} if gradients is None else gradients

    def loss(params: Params, i: int) -> Tensor:
        x, y = data.train.of(i)
        return (model(params, x) - y).square().mean()

    for t in range(3):
        score = theta[t].square() * (here[t] if renormalise else 1)
        share = score / score.sum()
        rates = rates_of(steps, here[t], renormalise=renormalise) if nova else [0.1] * 4
        models = []
        for i in range(4):
            u = w
            for s in range(steps[i]):
                if path:
                    total = total + loss(u, i) * (1 if all_clients else here[t, i])
                    at: Params = {k: v.detach().requires_grad_() for k, v in u.items()}
                    if (t, i, s) not in gradients:
                        gradients[t, i, s] = list(torch.autograd.grad(loss(at, i), list(at.values())))
                    found = gradients[t, i, s]
                else:
                    at = {k: v if v.requires_grad else v.requires_grad_() for k, v in u.items()}
                    found = list(torch.autograd.grad(loss(at, i), list(at.values()), create_graph=True))
                u = {k: u[k] - rates[i] * here[t, i] * g for k, g in zip(at, found, strict=True)}
            models.append(u)
        w = {k: sum(share[i] * models[i][k] for i in range(4)) for k in w}  # type: ignore[misc]
    for i in range(4):
        total = total + steps[i] * loss(w, i)
    return total


def environment_of(missing: Any, *, nova: bool) -> Environment:
    epochs = UNEQUAL if nova else ()
    return (
        Environment(seed=5, epochs=epochs, answer=(0.6,) * 4, missing=missing)
        if missing
        else Environment(epochs=epochs)
    )


def start() -> Tensor:
    return (SIZES / SIZES.sum()).sqrt().repeat(3, 1)


def drawn(environment: Environment, round: int) -> Tensor:
    found = [environment.answers(round, t, range(4), [9, 1, 6, 13]) for t in range(3)]
    return torch.tensor([[float(c in a) for c in range(4)] for a in found], dtype=F64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("missing", ["", "stale", "renormalise"])
@pytest.mark.parametrize("algorithm", [DUW, NOVA], ids=["fedavg", "fednova"])
def test_first_order_gradient_is_autograd_of_the_same_objective(algorithm: Any, missing: Any, engine: str) -> None:
    nova, renormalise = algorithm is NOVA, missing == "renormalise"
    environment = environment_of(missing, nova=nova)
    _, server = prepared(algorithm, engine, environment=environment)
    here = drawn(environment, 0)
    assert bool((here == 0).any()) == bool(missing)

    def wanted(*, all_clients: bool) -> Tensor:
        theta = start().requires_grad_()
        total = outer_loss(theta, here, path=True, renormalise=renormalise, nova=nova, all_clients=all_clients)
        return torch.autograd.grad(total, theta)[0]

    torch.testing.assert_close(gradient_of(server), wanted(all_clients=True), rtol=0, atol=1e-10)
    assert float(gradient_of(server).abs().max()) > 1e-3
    if missing:  # and not of the losses of those who answered
        assert float((gradient_of(server) - wanted(all_clients=False)).abs().max()) > 1e-3


def difference(total: Callable[[Tensor], Tensor], t: int, k: int, step: float = 1e-5) -> float:
    """Central, by one weight."""
    ends = []
    for by in (step, -step):
        theta = start()
        theta[t, k] += by
        ends.append(total(theta).detach())
    return float(ends[0] - ends[1]) / (2 * step)


@pytest.mark.parametrize("algorithm", [DUW, NOVA], ids=["fedavg", "fednova"])
def test_first_order_gradient_is_finite_differences_with_local_gradients_held(algorithm: Any) -> None:
    nova, gradients = algorithm is NOVA, Gradients()
    environment = environment_of("stale", nova=nova)
    _, server = prepared(algorithm, environment=environment)
    found, here = gradient_of(server), drawn(environment, 0)
    outer_loss(start(), here, path=True, nova=nova, gradients=gradients)
    for t in range(3):
        for k in range(4):
            wanted = difference(lambda theta: outer_loss(theta, here, path=True, nova=nova, gradients=gradients), t, k)
            assert float(found[t, k]) == pytest.approx(wanted, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", [DUW, NOVA], ids=["fedavg", "fednova"])
def test_exact_gradient_is_finite_differences(algorithm: Any, engine: str) -> None:
    nova = algorithm is NOVA
    environment = environment_of("stale", nova=nova)
    _, server = prepared(replace(algorithm, gradient="exact", outer="final"), engine, environment=environment)
    found, here = gradient_of(server), drawn(environment, 0)
    for t in range(3):
        for k in range(4):
            wanted = difference(lambda theta: outer_loss(theta, here, path=False, nova=nova), t, k)
            assert float(found[t, k]) == pytest.approx(wanted, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("algorithm", [DUW, NOVA], ids=["fedavg", "fednova"])
def test_a_start_drawn_anew(algorithm: Any) -> None:
    """Line 2 of Algorithms 3 and 4: the gradient is that from other initial values, and the run starts from its own."""
    fed, server = prepared(replace(algorithm, start="anew"), environment=environment_of("", nova=algorithm is NOVA))
    model = fed.model
    w, other = (model.redraw(3, "start", round) for round in (0, 1))
    assert_equal(w, model.redraw(3, "start", 0), 0)
    assert {k: v.shape for k, v in w.items()} == {k: v.shape for k, v in model.params.items()}
    for k, v in model.params.items():
        assert float((w[k] - v).abs().max()) > 1e-3
        assert float((w[k] - other[k]).abs().max()) > 1e-3
    theta = start().requires_grad_()
    total = outer_loss(theta, torch.ones(3, 4, dtype=F64), path=True, nova=algorithm is NOVA, w=w)
    torch.testing.assert_close(gradient_of(server), torch.autograd.grad(total, theta)[0], rtol=0, atol=1e-10)
    assert_equal(server["w"], model.params, 0)
    with pytest.raises(ConfigError, match="drawn anew"):
        replace(algorithm, start="anew").check(make_model("headless", make_data()), "classification")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [DUWFedAvg, DUWFedNova])
def test_only_the_selected_take_part(kind: Any, engine: str) -> None:
    """Two of four, with the largest weights of the round, are called and averaged; nobody hears of the others."""
    theta = (1.0, 3.0, 2.0, 0.5, 2.0, 0.1, 0.2, 2.0)
    data = make_data("regression")
    algorithm = kind(epochs=2, horizon=2, outer_iterations=0, theta=theta, select=2)
    everybody = replace(algorithm, select=0)
    down = {}
    for chosen, them in ((algorithm, ([1, 2], [0, 3])), (everybody, (range(4), range(4)))):
        fed = federate(chosen, data, make_model("mlp", data), engine, FULL_BATCH)
        server, w = chosen.server_init(fed.model), fed.model.params
        for round, who in enumerate(them, start=1):
            server = fed.run_round(round, range(4), server)
            score = torch.tensor(theta[4 * round - 4 : 4 * round], dtype=F64)[list(who)].square()
            share = score / score.sum()
            each = [descend(fed.model, w, *data.train.of(c), steps=2) for c in who]
            w = {k: sum(s * m[k] for s, m in zip(share, each, strict=True)) for k in w}
            assert_equal(server["w"], w)
            told = torch.tensor(fed.record.reported["weights"], dtype=F64)
            assert told.nonzero().flatten().tolist() == list(who)
            torch.testing.assert_close(told[list(who)], share)
        down[len(them[0])] = fed.traffic.down
    assert down[2] == pytest.approx(down[4] / 2, rel=0.02)
    with pytest.raises(ConfigError, match=r"algorithm\.select"):
        replace(algorithm, weights="rule", theta=()).check(make_model("mlp", data), "regression")


def test_one_failed_client_is_asked_for_its_loss_whatever_the_least_number_of_replies() -> None:
    environment = Environment(answer=(1.0, 1.0, 0.0, 1.0), missing="stale")
    fed, server = prepared(DUW, environment=environment, limits=Limits(min_replies=3))
    assert float(gradient_of(server).abs().max()) > 1e-3
    assert fed.traffic.trips == 3 + 3 + 1


def test_the_server_counts_the_steps_of_clients() -> None:
    data = make_data()
    for solver in (Solver(batch_size=4), FULL_BATCH, Solver(batch_size=2, epoch=3)):
        environment = Environment(epochs=UNEQUAL)
        fed = federate(FedNova(epochs=2), data, make_model("mlp", data), solver=solver, environment=environment)
        run(fed, 1)
        _, by, times = fed.map(fed.engine.experiment.algorithm.local, fed.model.params)  # type: ignore[attr-defined]
        told = (fed.gather(times, "times") / fed.gather(by, "by")).sqrt()
        torch.testing.assert_close(fed.steps(range(4), 2), told)


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
    for algorithm in (DUW, NOVA):
        with pytest.raises(ConfigError, match="use plain sgd"):
            algorithm.check_solver(Solver(lr=0.1, momentum=0.9))
        with pytest.raises(ConfigError, match="with mu a move is no sum"):
            replace(algorithm, mu=0.1).check(make_model("mlp", data), "regression")


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
