"""What lasts longer than a step or a round: accumulated gradients, kept optimizers, server optimizers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor import algorithms
from fedtailor.aggregation.server_step import ServerOptimizer
from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.client import OPTIMIZER
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError, RoundAbandoned
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse
from fedtailor.training.kernels import selection
from fedtailor.training.solver import Solver
from tests.helpers import (
    F64,
    assert_equal,
    everything,
    federate,
    make_data,
    make_me,
    make_model,
    models,
    run,
    states,
)

WHOLE = Solver(lr=0.05, batch_size=0)
AGREEING = ("vmap", "vmap2", "wire", "pool")


@pytest.mark.parametrize("client", range(4))
@pytest.mark.parametrize("augmented", [False, True])
def test_accumulated_gradients_are_those_of_a_larger_batch(client: int, augmented: bool) -> None:
    data = make_data(shape=(1, 8, 8) if augmented else (4,))
    model = make_model("conv" if augmented else "mlp", data)
    once = Solver("adam", 0.01, batch_size=6, augment="crop-flip" if augmented else None)
    parts = replace(once, batch_size=2, accumulate=3)
    wanted, found = make_me(data, model, client, once), make_me(data, model, client, parts)
    assert_equal(found.sgd(model.params, epochs=3), wanted.sgd(model.params, epochs=3))
    assert int(found.steps(3)) == int(wanted.steps(3))


def test_statistics_of_a_batch_are_those_of_its_parts() -> None:
    data = make_data()
    model = make_model("normed", data)
    me = make_me(data, model, 3, Solver(lr=0.0, batch_size=4, accumulate=2))
    first, last = me.solver._batches(me, data.train, 1, 0, False)  # type: ignore[attr-defined]
    wanted = torch.zeros(5, dtype=F64)
    for rows in (
        first.rows[:4],
        first.rows[4:],
        last.rows,
    ):  # 13 samples: 4 and 4; of 5 a single one would have no variance
        hidden = data.train.x[rows] @ model.params["first.weight"].T + model.params["first.bias"]
        wanted = 0.9 * wanted + 0.1 * hidden.mean(0)
    me.sgd(model.params)
    assert_equal(me.buffers["norm.running_mean"], wanted)


def torch_steps(kind: Any, model: Any, rows: tuple[Tensor, Tensor], steps: int) -> Params:
    """One torch optimizer for all steps."""
    params = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    optimizer = kind(list(params.values()))
    for _ in range(steps):
        optimizer.zero_grad()
        output = torch.func.functional_call(model.module, params, (rows[0],))
        nn.functional.mse_loss(output, rows[1]).backward()
        optimizer.step()
    return {k: v.detach() for k, v in params.items()}


OPTIMIZERS: dict[str, tuple[Solver, Any]] = {
    "momentum": (replace(WHOLE, momentum=0.9, keep_state=True), lambda p: torch.optim.SGD(p, 0.05, 0.9)),
    "nesterov": (
        replace(WHOLE, optimizer="nesterov", momentum=0.9, keep_state=True),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True),
    ),
    "adam": (replace(WHOLE, optimizer="adam", keep_state=True), lambda p: torch.optim.Adam(p, 0.05, eps=0)),
    "adamw": (
        replace(WHOLE, optimizer="adamw", weight_decay=0.1, keep_state=True),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1, eps=0),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kept_optimizer_is_one_optimizer_for_all_rounds(name: str) -> None:
    solver, kind = OPTIMIZERS[name]
    data = make_data("regression")
    model = make_model("linear", data)
    fed = federate(algorithms.make("local", {"epochs": 2}), data, model, "loop", solver)
    found = models(fed, run(fed, 3))
    for i, client in enumerate(data.clients):
        assert_equal(found[client], torch_steps(kind, model, data.train.of(i), 6), 1e-7)
    reset = federate(algorithms.make("local", {"epochs": 2}), data, model, "loop", replace(solver, keep_state=False))
    assert not torch.allclose(models(reset, run(reset, 3))["ada"]["out.weight"], found["ada"]["out.weight"])


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "learn2pfed-net"])
def test_kept_optimizers_agree_on_every_engine(name: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    solver = Solver("adam", 0.01, batch_size=2, keep_state=True, accumulate=2)

    def outcome(engine: str) -> dict[str, Any]:
        fed = federate(algorithms.make(name, {}), data, model, engine, solver)
        server = fed.engine.experiment.algorithm.server_init(model)
        try:
            for round, cohort in enumerate([(0, 1, 2, 3), (0, 2), (1, 2, 3)], start=1):  # clients differ in their steps
                server = fed.run_round(round, cohort, server)
            return everything(fed, server)
        finally:
            fed.engine.close()

    wanted = outcome("loop")
    assert any(OPTIMIZER in path for path in wanted)
    for engine in AGREEING:
        assert_equal(outcome(engine), wanted, 0 if engine in ("wire", "pool") else 1e-9)


def test_an_abandoned_round_leaves_optimizers_as_they_were() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(
        algorithms.make("fedavg", {}), data, model, "loop", OPTIMIZERS["adam"][0], server_step=ServerOptimizer("adam")
    )
    server = run(fed, 2)
    before, moments = states(fed), dict(fed.sums.moments)
    fed.limits = replace(fed.limits, max_norm=1e-9)
    with pytest.raises(RoundAbandoned):
        fed.run_round(3, range(4), server)
    assert_equal(states(fed), before, 0)
    assert_equal(fed.sums.moments, moments, 0)


def test_fast_paths_are_not_taken_with_options_that_they_do_not_know() -> None:
    data = make_data()
    model = make_model("mlp", data)
    taken: list[bool] = []
    inside = selection.fast_path

    def watched(training: Any, t: Tree) -> Any:
        taken.append(inside(training, t) is not None)
        return inside(training, t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "fast_path", watched)
        make_me(data, model, 0, Solver(batch_size=2)).sgd(model.params)
        assert taken == [True]
        make_me(data, model, 0, Solver(batch_size=2, accumulate=2)).sgd(model.params)
        make_me(data, model, 0, Solver(batch_size=2)).sgd(model.params, after_step=lambda p: p)
        assert taken == [True, False, False]


def by_hand(name: str, lr: float, sent: Params, means: list[Params]) -> Params:
    """Algorithm 2 of Reddi et al., line by line, with means that do not depend on the model."""
    m = {k: torch.zeros_like(w) for k, w in sent.items()}
    v = {k: torch.full_like(w, 1e-6) for k, w in sent.items()}
    x = dict(sent)
    for mean in means:
        for k in x:
            delta = mean[k] - x[k]
            if name == "momentum":
                m[k] = 0.9 * m[k] + delta
                x[k] = x[k] + lr * m[k]
                continue
            m[k] = 0.9 * m[k] + 0.1 * delta
            if name == "adam":
                v[k] = 0.99 * v[k] + 0.01 * delta**2
            else:
                v[k] = v[k] - 0.01 * delta**2 * torch.sign(v[k] - delta**2)
            x[k] = x[k] + lr * m[k] / (v[k].sqrt() + 1e-3)
    return x


@dataclass(frozen=True)
class Given(Algorithm):
    """Clients reply the round's number times the first model: a mean that is known beforehand."""

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, ({k: v * me.round for k, v in me.model.params.items()}, me.n)

    def server_init(self, model: Any) -> Params:
        return dict(model.params)

    def round(self, fed: Federation, w: Tree) -> Tree:
        return fed.mean(*fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Tree) -> Params:
        return w


@pytest.mark.parametrize("name", ["momentum", "adam", "yogi"])
def test_server_steps_are_those_of_the_paper(name: Any) -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(Given(), data, model, server_step=ServerOptimizer(name, 0.3))
    server: Params = dict(model.params)
    for round in (1, 2, 3):
        server = fed.run_round(round, range(4), server)
    means = [{k: v * r for k, v in model.params.items()} for r in (1, 2, 3)]
    assert_equal(server, by_hand(name, 0.3, model.params, means), 1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "scaffold", "duw-fedavg"])
def test_server_steps_agree_on_every_engine(name: str) -> None:
    data = make_data()
    model = make_model("normed" if name == "fedrep" else "mlp", data)

    def outcome(engine: str) -> Any:
        fed = federate(algorithms.make(name, {}), data, model, engine, server_step=ServerOptimizer("yogi", 0.1))
        server = fed.engine.experiment.algorithm.server_init(model)
        try:
            for round in (1, 2):
                server = fed.run_round(round, range(4), server)
            return everything(fed, server), fed.sums.moments
        finally:
            fed.engine.close()

    wanted, moments = outcome("loop")
    assert moments or name == "duw-fedavg"
    for engine in AGREEING:
        found, own = outcome(engine)
        assert_equal(found, wanted, 1e-9)
        assert_equal(own, moments, 1e-9)


def test_momentum_of_zero_and_a_step_of_one_is_the_mean() -> None:
    data = make_data()
    model = make_model("mlp", data)
    plain = federate(algorithms.make("fedavg", {}), data, model)
    same = federate(algorithms.make("fedavg", {}), data, model, server_step=ServerOptimizer("momentum", 1.0, 0.0))
    assert_equal(run(same), run(plain), 1e-12)


def test_statistics_are_averaged_and_not_stepped() -> None:
    data = make_data()
    model = make_model("normed", data, buffers="mean")
    plain = federate(algorithms.make("fedavg", {}), data, model)
    stepped = federate(algorithms.make("fedavg", {}), data, model, server_step=ServerOptimizer("adam", 0.1))
    wanted, found = (fed.run_round(1, range(4), dict(model.params)) for fed in (plain, stepped))
    assert_equal(found["norm.running_mean"], wanted["norm.running_mean"], 1e-12)
    assert not torch.allclose(found["out.weight"], wanted["out.weight"])


@dataclass(frozen=True)
class Taped(Algorithm):
    """Two rounds of FedAvg on a tape: the derivative of the loss after them by the first model."""

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, (me.sgd(w, epochs=1, after_step=lambda p: {k: v * 0.9 for k, v in p.items()}), me.n)

    def server_init(self, model: Any) -> Tree:
        return {"w": model.params}

    @on_client(sends=NUMBER)
    def judge(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, me.loss(w) + 1

    def round(self, fed: Federation, server: Tree) -> Tree:
        w = start = fed.tape(server["w"])
        for _ in range(2):
            w = fed.mean(*fed.map(self.local, w))
        loss = fed.sum(fed.map(self.judge, w))
        return {"w": start, "loss": loss.detach(), "gradient": fed.backward(loss)}


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
@pytest.mark.parametrize("server", ["momentum", "adam", "yogi"])
def test_derivatives_go_through_kept_optimizers_and_server_steps(engine: str, server: Any) -> None:
    data = make_data("regression")
    model = make_model("linear", data)
    solver = Solver("adam", 0.05, batch_size=2, accumulate=2, keep_state=True)

    def outcome(w: Params) -> Tree:
        fed = federate(Taped(), data, model, engine, solver, server_step=ServerOptimizer(server, 0.1))
        return fed.run_round(1, range(4), {"w": w})

    gradient, step = outcome(model.params)["gradient"], 1e-6
    for key, at in ((next(iter(model.params)), (0, 1)), (list(model.params)[-1], (1,))):
        ends = []
        for sign in (1, -1):
            moved = {k: v.clone() for k, v in model.params.items()}
            moved[key][at] += sign * step
            ends.append(outcome(moved)["loss"])
        assert float(gradient[key][at]) == pytest.approx(float((ends[0] - ends[1]) / (2 * step)), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", ["local", "fedamp", "ifca", "pfedbayes"])
def test_algorithms_without_a_mean_of_models_are_refused_by_name(name: str) -> None:
    config = parse({"algorithm": {"name": name}, "server": {"optimizer": "adam"}})
    title = algorithms.make(name, {}).title
    with pytest.raises(ConfigError, match=rf"server\.optimizer.*{title} takes no mean of models"):
        build_experiment(config)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "fedrep", "lg-fedavg", "scaffold", "fednova", "pfedme"])
def test_algorithms_that_average_models_take_server_steps(name: str) -> None:
    config = parse({"algorithm": {"name": name}, "server": {"optimizer": "adam"}})
    assert build_experiment(config).aggregation.server_step == ServerOptimizer("adam")


@pytest.mark.parametrize("engine", ["loop", *AGREEING])
def test_after_step_projects_every_step(engine: str) -> None:
    data = make_data("regression")
    model = make_model("linear", data)
    fed = federate(Projected(), data, model, engine)
    try:
        found = models(fed, run(fed, 1))
    finally:
        fed.engine.close()
    for i, client in enumerate(data.clients):
        me = make_me(data, model, i)
        me.key = (3, 0, 0)  # seed, round, call
        w = {k: v.clone() for k, v in model.params.items()}
        batches = me.solver._batches(me, data.train, 1, 0, False)  # type: ignore[attr-defined]
        for batch in batches:
            leaf = {k: v.detach().requires_grad_() for k, v in w.items()}
            x, y = data.train.x[batch.rows], data.train.y[batch.rows]
            nn.functional.mse_loss(torch.func.functional_call(model.module, leaf, (x,)), y).backward()
            w = {k: (v - 0.1 * v.grad).detach().clamp(-0.2, 0.2) for k, v in leaf.items()}  # type: ignore[operator]
        assert_equal(found[client], w, 1e-10)


@dataclass(frozen=True)
class Projected(Algorithm):
    """Each client alone, within a box."""

    def client_init(self, me: ClientContext) -> Tree:
        return dict(me.model.params)

    @on_client()
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.sgd(me.state, after_step=lambda p: {k: v.clamp(-0.2, 0.2) for k, v in p.items()}), None

    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.map(self.local)
        return server

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state


@dataclass(frozen=True)
class ByIndex(Algorithm):
    """A number of its own for each training sample, which its loss alone finds; the model stays."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"own": torch.zeros(13, dtype=me.n.dtype), "rows": me.n * 0}

    @on_client()
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        def loss(t: Params, x: Tensor, y: Tensor, weight: Tensor, index: Tensor) -> Tensor:
            return (t["own"][index] - x.flatten(1).sum(-1)).square() * weight.sum() / 2

        made = me.sgd({"own": me.state["own"]}, frozen=me.model.params, epochs=2, loss=loss, lr=0.25)
        return me.state | made, None

    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.map(self.local)
        return server

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return dict(me.model.params)


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_an_own_loss_knows_weights_and_rows(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(ByIndex(), data, model, engine)
    run(fed, 1)
    for i, client in enumerate(data.clients):
        x = data.train.of(i)[0].flatten(1).sum(-1)
        found = states(fed)[client]["state"]["own"]
        # of a batch of n samples, weight.sum() / 2 times the mean: each moves by lr times its own difference, per epoch
        assert_equal(found[: len(x)], x * (1 - 0.75**2), 1e-10)
        assert not found[len(x) :].any()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="accumulate needs batch_size"):
        parse({"local": {"batch_size": 0, "accumulate": 2}})
    with pytest.raises(ConfigError, match=r"server\.optimizer"):
        parse({"server": {"optimizer": "adagrad"}})
    data = make_data()
    model = make_model("mlp", data)
    with pytest.raises(TypeError, match="after_step must return all"):
        make_me(data, model).sgd(model.params, after_step=lambda p: {})
