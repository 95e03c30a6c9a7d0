"""Learn2pFed on linear models: exact gradients, fixed points, limits, and the degrees it finds."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms import make
from fedtailor.algorithms._shared.learnables import SCALARS, degrees
from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.core.client import initial, personal
from fedtailor.core.data import FederatedData
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.core.trees import Tree, items, tree_map
from fedtailor.data import load
from fedtailor.data.configs import PolynomialConfig
from fedtailor.errors import ConfigError, RoundAbandoned
from fedtailor.models import build
from fedtailor.numerics import ridge
from tests.helpers import ENGINES, F64, federate, make_data, make_model, models, run

ALL = ("lam", *SCALARS)
UNROLLED = Learn2pFed(outer="train", learned=ALL, reach=0.0, cells=3, pull=0.0, outer_lr=0.0, serve="unrolled")


def linear(algorithm: Learn2pFed, engine: str = "loop", **options: Any) -> Federation:
    data = make_data("regression", **options)
    return federate(algorithm, data, make_model("linear", data), engine)


def gradients(fed: Federation) -> Tensor:
    """Of the first round's outer loss, by every learned number (raw), stacked over the clients."""
    rate = 1e-3
    algorithm = fed.engine.experiment.algorithm
    assert isinstance(algorithm, Learn2pFed)
    object.__setattr__(fed.engine.experiment, "algorithm", replace(algorithm, optimizer="sgd", outer_lr=rate))
    before = fed.engine.get_states()["state"]["learned"]["raw"].clone()
    run(fed, rounds=1)
    after = fed.engine.get_states()["state"]["learned"]["raw"]
    return (before - after) / rate


def named(raw: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The raw numbers of one client by name: degrees first, then the five scalars."""
    return {"lam": raw[:-5].reshape(shape), **dict(zip(("p", "rho", "eta", "gamma", "theta"), raw[-5:], strict=True))}


def outer_loss(algorithm: Learn2pFed, data: FederatedData, raw: Tensor) -> Tensor:
    """The same network in plain torch: all clients' data in one graph."""
    model = make_model("linear", data)
    clients = range(len(data.clients))
    x = [torch.cat([data.train.of(i)[0], torch.ones(len(data.train.of(i)[0]), 1, dtype=F64)], dim=1) for i in clients]
    y = [data.train.of(i)[1] for i in clients]
    w = ridge.as_vector(model, model.params)
    v, z, a = ([w] * len(x) for _ in range(3))
    z = a = [torch.zeros_like(w)] * len(x)
    for cell in range(algorithm.cells):
        part = raw[:, cell] if algorithm.per_cell else raw
        n = [{k: r.exp() for k, r in named(part[i], tuple(w.shape)).items()} for i in clients]
        a = [a[i] + n[i]["theta"] * (z[i] - v[i] + w) for i in clients]
        eye = torch.eye(len(w), dtype=F64)
        v = [
            torch.linalg.solve(x[i].mT @ x[i] + n[i]["rho"] * eye, n[i]["rho"] * (w + z[i] + a[i]) + x[i].mT @ y[i])
            for i in clients
        ]
        z = [n[i]["eta"] / (n[i]["lam"] + n[i]["eta"]) * (v[i] - w - a[i]) for i in clients]
        c = [n[i]["p"] * n[i]["gamma"] for i in clients]
        w = sum(c[i] * (v[i] - z[i] - a[i]) for i in clients) / sum(c)  # type: ignore[assignment]
        if algorithm.gradient == "local":
            w = w.detach()
    if algorithm.outer == "loo":
        lam = [n[i]["rho"] / n[i]["eta"] * n[i]["lam"] for i in clients]
        wrong = sum(left_out(x[i], y[i], lam[i], w) for i in clients)
    elif algorithm.outer == "holdout":
        lam = [n[i]["rho"] / n[i]["eta"] * n[i]["lam"] for i in clients]
        wrong = sum(held_out(x[i], y[i], lam[i], w, *data.val.of(i)) for i in clients)
        return wrong / sum(len(data.val.of(i)[1]) for i in clients)  # type: ignore[return-value]
    else:
        wrong = sum((x[i] @ v[i] - y[i]).square().sum() for i in clients)
    return wrong / sum(len(part) for part in x)  # type: ignore[return-value]


def left_out(x: Tensor, y: Tensor, lam: Tensor, w: Tensor) -> Tensor:
    """Every sample predicted by a model that is fitted, output by output, to all others."""
    wrong = torch.zeros((), dtype=F64)
    for j in range(len(x)):
        rest = [i for i in range(len(x)) if i != j]
        for out in range(y.shape[1]):
            pull = torch.diag(lam[:, out])
            v = torch.linalg.solve(x[rest].mT @ x[rest] + pull, x[rest].mT @ y[rest, out] + pull @ w[:, out])
            wrong = wrong + (x[j] @ v - y[j, out]).square()
    return wrong


def held_out(x: Tensor, y: Tensor, lam: Tensor, w: Tensor, x_val: Tensor, y_val: Tensor) -> Tensor:
    """Squared errors of the model that is served, output by output, on samples that it has not seen."""
    x_val, wrong = torch.cat([x_val, torch.ones(len(x_val), 1, dtype=F64)], dim=1), torch.zeros((), dtype=F64)
    for out in range(y.shape[1]):
        pull = torch.diag(lam[:, out])
        v = torch.linalg.solve(x.mT @ x + pull, x.mT @ y[:, out] + pull @ w[:, out])
        wrong = wrong + (x_val @ v - y_val[:, out]).square().sum()
    return wrong


def clip(gradient: Tensor) -> Tensor:
    """As plain descent does, by the numbers of all clients together."""
    return gradient / gradient.norm().clamp(min=1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [{}, {"per_cell": True}, {"gradient": "local"}, {"outer": "loo"}, {"outer": "holdout", "serve": "solved"}],
    ids=["exact", "per-cell", "local", "loo", "holdout"],
)
def test_federated_gradient_is_central_autograd(options: dict[str, Any], engine: str) -> None:
    algorithm = replace(UNROLLED, **options)
    fed = linear(algorithm, engine)
    raw = fed.engine.get_states()["state"]["learned"]["raw"].clone().requires_grad_()
    loss = outer_loss(algorithm, fed.engine.experiment.data, raw)
    (central,) = torch.autograd.grad(loss, raw)
    found = gradients(fed)
    torch.testing.assert_close(found, clip(central), rtol=0, atol=1e-10)
    # p and gamma act on the common model only, which the local gradient takes as constant
    idle = [-5, -2] if algorithm.gradient == "local" else []
    largest = found.abs().reshape(-1, found.shape[-1]).amax(0)
    assert (largest < 1e-6).nonzero().flatten().tolist() == sorted(len(largest) + i for i in idle)


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_federated_gradient_is_finite_differences(engine: str) -> None:
    found = gradients(linear(UNROLLED, engine))
    step = 1e-5

    def loss(place: tuple[int, ...], by: float) -> float:
        fed = linear(UNROLLED)
        raw = fed.engine.get_states()["state"]["learned"]["raw"].clone()
        raw[place] += by
        return float(outer_loss(UNROLLED, fed.engine.experiment.data, raw))

    wanted = torch.zeros_like(found)
    for at in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        wanted[tuple(at)] = (loss(tuple(at), step) - loss(tuple(at), -step)) / (2 * step)
    torch.testing.assert_close(found, clip(wanted), rtol=1e-5, atol=1e-8)


COLD: Any = make("learn2pfed", {"preset": "paper", "cells": 2, "lam": 0.5, "rho": 0.7, "theta": 0.4, "spread": 0.3})


@pytest.mark.parametrize("engine", ENGINES)
def test_two_cells_from_a_fixed_start_by_hand(engine: str) -> None:
    """(9) to (12) number by number, with other numbers in the second cell; every round starts at the same place."""
    data = make_data("regression", names=("ada", "di"), outputs=1)
    fed = federate(replace(COLD, optimizer="adam", outer_lr=0.0), data, make_model("linear", data), engine)
    rows = tree_map(torch.clone, fed.engine.get_states())
    lam, v0 = rows["state"]["learned"]["raw"][:, :, :5], rows["state"]["start"][:, :, 0]
    lam *= torch.tensor([[[1.0], [2.0]]], dtype=F64)  # of the second cell
    fed.engine.set_states(tree_map(torch.clone, rows))
    w = 0.3 * torch.from_numpy(stream(3, "Learn2pFed", "w").normal(size=(5, 1)))[:, 0]
    v, z, a = list(v0), [v0[0] - w, v0[1] - w], [0 * w, 0 * w]
    p = [9 / 22, 13 / 22]
    for cell in range(2):
        sent = []
        for i in range(2):
            x, y = data.train.of(i)
            x, y = torch.cat([x, torch.ones(len(x), 1, dtype=F64)], dim=1), y[:, 0]
            a[i] = a[i] + 0.4 * (z[i] - v[i] + w)  # (9)
            v[i] = torch.linalg.inv(x.T @ x + 0.7 * torch.eye(5, dtype=F64)) @ (
                0.7 * (w + z[i] + a[i]) + x.T @ y
            )  # (10)
            z[i] = 0.7 / (lam[i, cell] + 0.7) * (v[i] - w - a[i])  # (11)
            sent.append(p[i] * 0.7 * (v[i] - z[i] - a[i]))
        w = (sent[0] + sent[1]) / (0.7 * (p[0] + p[1]))  # (12)
    wanted = torch.stack(v)
    for round in range(2):
        server = fed.run_round(round, range(2), fed.engine.experiment.algorithm.server_init(fed.model))
        torch.testing.assert_close(server["w"][:, 0], w, rtol=0, atol=1e-12)
        found = fed.engine.get_states()["state"]["v"][:, :, 0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_cold_gradient_is_finite_differences(preset: str, engine: str) -> None:
    """Of every learned number of every cell, to 1e-6."""
    raw, wanted, rows, data = slopes_of_a_cold_round(preset)
    algorithm = replace(cold(preset), outer_lr=1e-3)
    fed = federate(algorithm, data, make_model("linear", data), engine)
    fed.engine.set_states(tree_map(torch.clone, rows))
    fed.run_round(0, range(2), algorithm.server_init(fed.model))
    found = (raw - fed.engine.get_states()["state"]["learned"]["raw"]) / 1e-3
    torch.testing.assert_close(found, clip(wanted), rtol=1e-6, atol=1e-9)
    assert float(found.abs().amax(tuple(range(found.dim() - 1))).min()) > 1e-6


def cold(preset: str) -> Learn2pFed:
    numbers = {"lam": 0.5, "rho": 0.7, "theta": 0.4, "spread": 0.3, "cells": 2, "outer_lr": 0.0}
    algorithm = make("learn2pfed", {"preset": preset, **numbers})
    assert isinstance(algorithm, Learn2pFed)
    return algorithm


@cache
def slopes_of_a_cold_round(preset: str) -> tuple[Tensor, Tensor, Any, FederatedData]:
    """The numbers at which a round begins, how its outer loss changes with each, and the states of the clients."""
    data = make_data("regression", names=("ada", "di"), outputs=1)
    algorithm = replace(cold(preset), diagnostics=True)
    fed = federate(algorithm, data, make_model("linear", data))
    server, rows = algorithm.server_init(fed.model), tree_map(torch.clone, fed.engine.get_states())
    learned = rows["state"]["learned"]
    raw = learned["raw"]
    p = (data.train.sizes / data.train.sizes.sum()).to(F64)
    raw[..., -5] = p.reshape(-1, *[1] * (raw.dim() - 2))
    learned["steps"] += 1  # p is as it is now

    def loss(at: list[int], by: float) -> float:
        moved = raw.clone()
        moved[tuple(at)] += by
        fed.engine.set_states(rows | {"state": rows["state"] | {"learned": learned | {"raw": moved}}})
        fed.run_round(0, range(2), server)
        return float(fed.record.reported["outer_loss"])  # type: ignore[arg-type]

    places = torch.cartesian_prod(*map(torch.arange, raw.shape)).tolist()
    slopes = [(loss(at, 1e-5) - loss(at, -1e-5)) / 2e-5 for at in places]
    return raw, torch.tensor(slopes, dtype=F64).reshape(raw.shape), rows, data


def test_where_a_round_starts() -> None:
    """At the last round's end; at one place; at another place in every round, which is the same on every engine."""
    data = make_data("regression")
    ends: dict[tuple[str, str], list[Tensor]] = {}
    starts: tuple[Any, ...] = ("last", "fixed", "drawn")
    for start in starts:
        algorithm = replace(UNROLLED, start=start, positive="relu", weights="samples")
        for engine in ENGINES:
            fed = federate(algorithm, data, make_model("linear", data), engine)
            server, ends[start, engine] = algorithm.server_init(fed.model), []
            for round in (1, 2):
                server = fed.run_round(round, range(4), server)
                ends[start, engine].append(server["w"])
            torch.testing.assert_close(ends[start, engine], ends[start, "loop"], rtol=0, atol=1e-10)
    for start, is_same in (("fixed", True), ("drawn", False), ("last", False)):
        first, second = ends[start, "loop"]
        assert torch.allclose(first, second) is is_same, start


def test_first_numbers_as_in_the_released_code() -> None:
    """One Lambda for all clients, below lam; after the first round's beginning p = n_i / N; four scalars of rho."""
    data = make_data("regression")
    fed = federate(make("learn2pfed", {"preset": "released", "outer_lr": 0.0}), data, make_model("linear", data))
    run(fed, rounds=1)
    raw = fed.engine.get_states()["state"]["learned"]["raw"]
    lam = degrees(raw)
    assert torch.equal(lam, lam[:1].expand_as(lam))
    assert 0 < float(lam.min()) < float(lam.max()) < 0.001
    torch.testing.assert_close(raw[:, -5], torch.tensor([9, 1, 6, 13], dtype=F64) / 29)
    assert torch.equal(raw[:, -4:], torch.full((4, 4), 0.01, dtype=F64))


def test_steps_are_shorter_after_sixty_one_rounds() -> None:
    algorithm = make("learn2pfed", {"preset": "released"})
    assert isinstance(algorithm, Learn2pFed)
    learned = algorithm.first_numbers(torch.zeros(2, 1, dtype=F64))
    one = torch.ones((), dtype=F64)
    for steps, lr in ((0, 0.01), (60, 0.01), (61, 0.001), (400, 0.001)):
        after = algorithm.step(learned | {"steps": steps * one}, torch.ones_like(learned["raw"]), one)
        torch.testing.assert_close(learned["raw"] - after["raw"], torch.full((7,), lr, dtype=F64))


def test_a_weight_of_samples_has_no_bounds() -> None:
    data = make_data("regression")
    with pytest.raises(ConfigError, match="reach = 0"):
        Learn2pFed(weights="samples", learned=("p",)).check(make_model("linear", data), "regression")


def test_cells_converge_to_the_exact_inner_solution() -> None:
    options: dict[str, Any] = {"cells": 800, "learned": (), "rho": 2.0, "lam": 1.5}
    data = make_data("regression", names=("ada", "di"))
    model = make_model("linear", data)
    fed = federate(replace(UNROLLED, **options), data, model)
    rows = fed.engine.get_states()["state"]["learned"]["raw"]
    for place, values in {-3: [1.0, 3.0], -2: [0.5, 1.0], -5: [1.0, 2.0]}.items():  # eta, gamma, p
        rows[:, place] = torch.tensor(values, dtype=F64).log()
    server = run(fed, rounds=1)
    lam_eff = [2.0 / 1.0 * 1.5, 2.0 / 3.0 * 1.5]
    p_eff = [1.0 * 0.5 / 2.0, 2.0 * 1.0 / 2.0]
    d = [tree_map(lambda v, i=i: v[i], fed.engine.get_states()["state"]["d"]) for i in range(2)]
    eye = torch.eye(5, dtype=F64)
    left, right = torch.zeros(5, 5, dtype=F64), torch.zeros(5, 3, dtype=F64)
    for i in range(2):  # w = [sum p (L - L S L)]^-1 sum p L S b
        s = torch.linalg.inv(d[i]["A"] + lam_eff[i] * eye)
        left += p_eff[i] * (lam_eff[i] * eye - lam_eff[i] * s * lam_eff[i])
        right += p_eff[i] * lam_eff[i] * s @ d[i]["b"]
    torch.testing.assert_close(server["w"], torch.linalg.solve(left, right), rtol=0, atol=1e-8)


def test_limits_of_the_degree() -> None:
    data = make_data("regression", names=("ada", "di"))
    model = make_model("linear", data)
    d = [ridge.statistics(model, _view(data, i)) for i in range(2)]
    w = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    own = ridge.shrunk(d[0], torch.full_like(w, 1e8), w)
    torch.testing.assert_close(own, ridge.least_squares(d[0]), rtol=0, atol=1e-7)
    assert torch.equal(ridge.shrunk(d[0], torch.zeros_like(w), w), w)
    assert float(ridge.share(d[0], torch.zeros_like(w)).min()) == 1
    assert float(ridge.share(d[0], torch.full_like(w, 1e8)).max()) < 1e-9


def _view(data: FederatedData, client: int) -> Any:
    from fedtailor.core.context import View

    x, y = data.train.of(client)
    return View(x, y, torch.ones(len(x), dtype=F64))


@pytest.mark.parametrize("outer", ["loo", "holdout", "train"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_awkward_data_gives_finite_models(outer: str, engine: str) -> None:
    """A constant column, a client with one sample, more parameters than samples, equal columns."""
    data = make_data("regression", shape=(7,))
    x = data.train.x.clone()
    x[:, 1], x[:, 2] = 3.0, x[:, 0]
    data = replace(data, train=replace(data.train, x=x))
    algorithm = make("learn2pfed", {"outer": outer, "cells": 4})
    fed = federate(algorithm, data, make_model("linear", data), engine)
    server = run(fed, rounds=3)
    assert fed.record.faults == []
    for _, _, served in fed.engine.evaluate(range(4), 3, server, ["test"]):
        assert all(bool(torch.isfinite(v).all()) for _, v in items(served))


@pytest.mark.parametrize("setting", [1, 2, 3])
def test_degrees_tell_shared_from_personal_coefficients(setting: Any) -> None:
    data = load(PolynomialConfig(setting=setting), seed=0).to(F64)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    fed = federate(Learn2pFed(), data, model, "vmap")
    server = run(fed, rounds=100, cohort=range(10))
    lam = degrees(server["common"]["raw"]).exp()
    assert float(lam[: 4 - setting].min()) > 10 * float(lam[4 - setting :].max())
    errors = [m["test"]["mse"] for _, m, _ in fed.engine.evaluate(range(10), 20, server, ["test"])]
    alone = [
        float(
            (data.test.of(i)[0] @ ridge.least_squares(ridge.statistics(model, _view(data, i))) - data.test.of(i)[1])
            .square()
            .mean()
        )
        for i in range(10)
    ]
    assert float(torch.cat(errors).mean()) < sum(alone) / 10


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("pull", [1.0, 0.25])
def test_common_degrees_take_one_step_on_the_summed_gradient(pull: float, engine: str) -> None:
    """Adam's first step is lr times the sign; of the sum, not the mean of the clients' own signs."""
    each = gradients(linear(replace(UNROLLED, outer="loo"), engine))
    fed = linear(replace(UNROLLED, outer="loo", pull=pull, outer_lr=0.1), engine)
    before = fed.engine.get_states()["state"]["learned"]["raw"].clone()
    server = run(fed, rounds=1)
    assert float(each.norm()) < 1  # not clipped
    total = degrees(each).sum(0)
    torch.testing.assert_close(
        degrees(server["common"]["raw"]), degrees(before[0]) - 0.1 * total.sign(), atol=1e-6, rtol=0
    )
    assert not torch.equal(total.sign(), degrees(each).sign().mean(0))
    own = degrees(before) - 0.1 * degrees(each).sign()
    wanted = torch.lerp(own, degrees(server["common"]["raw"]).expand_as(own), pull)
    found = degrees(fed.engine.get_states()["state"]["learned"]["raw"])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_steps_do_not_run_away_where_everything_is_learned(seed: int) -> None:
    """Without bounds both seeds diverge in round 7 and 8."""
    data = load(PolynomialConfig(setting=3), seed=seed).to(F64)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    fed = federate(Learn2pFed(learned=ALL), data, model, "vmap")
    server = run(fed, rounds=15, cohort=range(10))
    assert float(server["w"].abs().max()) < 100
    wild = federate(Learn2pFed(learned=ALL, reach=0.0), data, model, "vmap")
    with pytest.raises(RoundAbandoned):
        run(wild, rounds=15, cohort=range(10))


def test_after_holding_out_the_served_model_is_fitted_to_all_samples() -> None:
    data = make_data("regression", names=("ada", "di"))
    model = make_model("linear", data)
    fed = federate(Learn2pFed(outer="holdout", outer_lr=0.0), data, model)
    server = run(fed, rounds=1)
    for i, found in enumerate(models(fed, server).values()):
        x, y = (torch.cat(part) for part in zip(data.train.of(i), data.val.of(i), strict=True))
        x = torch.cat([x, torch.ones(len(x), 1, dtype=F64)], dim=1)
        wanted = torch.linalg.solve(x.mT @ x + torch.eye(5, dtype=F64), x.mT @ y + server["w"])
        torch.testing.assert_close(ridge.as_vector(model, found), wanted, rtol=0, atol=1e-10)


def test_holdout_without_validation_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.val"):
        run(linear(Learn2pFed(outer="holdout"), names=("bo",)), cohort=[0])


def test_other_models_and_tasks_are_refused() -> None:
    data = make_data("regression")
    with pytest.raises(ConfigError, match=r'model\.name = "linear"'):
        Learn2pFed().check(make_model("mlp", data), "regression")
    with pytest.raises(ConfigError, match="for regression, not classification"):
        Learn2pFed().check(make_model("linear", data), "classification")
    with pytest.raises(ConfigError, match='did you mean "paper"'):
        make("learn2pfed", {"preset": "papper"})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("outer", ["train", "loo"])
def test_diagnostics_only_look(outer: Any, engine: str) -> None:
    plain, told = (replace(UNROLLED, outer=outer, outer_lr=0.1, diagnostics=d) for d in (False, True))
    without, fed = linear(plain, engine), linear(told, engine)
    for one in (without, fed):
        run(one, rounds=2)
    pairs = zip(items(without.engine.get_states()), items(fed.engine.get_states()), strict=True)
    for (path, a), (_, b) in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=path)
    assert {k: len(v) for k, v in fed.record.reported.items() if isinstance(v, list)} == {
        "augmented_lagrangian": 3,
        "primal_residual": 3,
        "dual_residual": 3,
    }
    assert fed.record.reported["gradient_norm"] > 0  # type: ignore[operator]
    assert fed.record.reported["outer_loss"] > 0  # type: ignore[operator]


def _lagrangian(rho: float) -> list[float]:
    data = load(PolynomialConfig(), seed=0).to(F64)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    algorithm = Learn2pFed(outer="train", learned=(), rho=rho, cells=12, diagnostics=True)
    fed = federate(algorithm, data, model, "vmap")
    values: list[float] = []
    server = algorithm.server_init(model)
    for round in range(3):
        server = fed.run_round(round, range(10), server)
        values += fed.record.reported["augmented_lagrangian"]  # type: ignore[arg-type]
    return values


def test_theorem_1_the_lagrangian_falls_where_rho_is_large_enough() -> None:
    large, small = _lagrangian(100.0), _lagrangian(0.01)
    assert all(b < a for a, b in pairwise(large))
    assert small[-1] > small[0]  # the assumption is needed


def test_lemma_1_a_dual_moves_although_its_model_stands_still() -> None:
    """No L with |a step| <= L |v step|: another client's data can move w so that (10) gives the same v again."""
    rho, theta, lam = 0.7, 0.4, 0.3
    d = rho / (lam + rho)
    data = make_data("regression", names=("ada", "di"), outputs=1)
    model = make_model("linear", data)
    w0 = ridge.as_vector(model, model.params)[:, 0]
    designs = [torch.cat([x := data.train.of(i)[0], torch.ones(len(x), 1, dtype=F64)], dim=1) for i in range(2)]
    y, eye = data.train.of(0)[1][:, 0], torch.eye(5, dtype=F64)
    v1 = torch.linalg.solve(designs[0].T @ designs[0] + rho * eye, rho * w0 + designs[0].T @ y)  # from v = w, z = a = 0
    w1 = (w0 + theta * v1) / (1 + theta) - d * (v1 - w0)  # with which w + z + a is as before
    other = (2 * w1 - 2 * d * w0) / (1 - d) - v1
    moment = (designs[1].T @ designs[1] + rho * eye) @ other - rho * w0
    theirs = designs[1] @ torch.linalg.solve(designs[1].T @ designs[1], moment)
    data = replace(data, train=replace(data.train, y=torch.cat([data.train.of(0)[1], theirs[:, None]])))

    def after(cells: int) -> Tree:
        algorithm = Learn2pFed(
            outer="train", serve="unrolled", lam=lam, rho=rho, theta=theta, cells=cells, outer_lr=0.0
        )
        fed = federate(algorithm, data, model)
        run(fed, rounds=1)
        return tree_map(lambda v: v[0], fed.engine.get_states()["state"])

    one, two = after(1), after(2)
    torch.testing.assert_close(one["v"][:, 0], v1, rtol=0, atol=1e-12)
    assert float((two["v"] - one["v"]).norm()) < 1e-12
    assert float((two["a"] - one["a"]).norm()) > 0.1


@pytest.mark.parametrize("outer", ["loo", "holdout"])
def test_a_new_client_fits_itself_in_one_step(outer: Any) -> None:
    """Ten members with a common slope; the newcomer has too few samples to find it alone."""
    data = load(PolynomialConfig(clients=11, samples=1100), seed=0).to(F64)
    val = replace(data.val, x=data.train.x, y=data.train.y, starts=data.train.starts)
    few = torch.cat([torch.arange(1000), torch.arange(1000, 1004)])
    starts = torch.cat([data.train.starts[:-1], torch.tensor([1004])])
    data = replace(data, train=replace(data.train, x=data.train.x[few], y=data.train.y[few], starts=starts), val=val)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    fed = federate(Learn2pFed(outer=outer), data, model, "vmap")
    setting = fed.engine.experiment
    server = run(fed, rounds=60, cohort=range(10))
    before = tree_map(torch.clone, server)
    state, buffers = initial(setting, [10], server, is_stacked=False)
    newcomer = personal(setting, [10], 20, state, buffers, server, is_stacked=False)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(items(before), items(server), strict=True))
    x, y = data.test.of(10)
    own = ridge.least_squares(ridge.statistics(model, _view(data, 10)))
    alone = float((x @ own - y).square().mean())
    assert float((model(newcomer, x) - y).square().mean()) < alone


@pytest.mark.parametrize("at", [2, 5])  # in a cell; on the way back (three cells and the loss come before)
def test_a_client_that_leaves_in_the_middle_costs_the_round_and_is_named(at: int) -> None:
    fed = linear(replace(UNROLLED, outer="loo"), "wire")
    before = tree_map(torch.clone, fed.engine.get_states())
    site = fed.engine.sites[1]  # type: ignore[attr-defined]
    answer, calls = site.handle, []

    def leaves(request: bytes) -> bytes:
        calls.append(request)
        if len(calls) > at:
            raise ConnectionError("gone")
        return answer(request)

    site.handle = leaves
    server = fed.engine.experiment.algorithm.server_init(fed.engine.experiment.model)
    with pytest.raises(RoundAbandoned, match=r"bo cannot be reached.*gone"):
        fed.run_round(0, range(4), server)
    after = fed.engine.get_states()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(items(before), items(after), strict=True))
    fed.run_round(1, [0, 2, 3], server)  # the others go on without it
