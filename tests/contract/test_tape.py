"""A round with a tape: its gradients are those of finite differences, and of one graph over everybody's data."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.data import FederatedData
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, items, tree_map
from fedtailor.errors import RoundAbandoned
from fedtailor.training.solver import Solver
from tests.helpers import EVEN_SIZES, EVERYWHERE, F64, OTHERS, assert_equal, federate, make_data, make_model, states

SOLVERS = {
    "sgd": Solver(lr=0.1, batch_size=0),
    "momentum": Solver(lr=0.1, batch_size=0, momentum=0.9, weight_decay=0.05),
    "adam": Solver(optimizer="adam", lr=0.1, batch_size=0),
}
EPOCHS, CELLS = 2, 2


def _private(algorithm: Any, model: Model) -> Tree:
    number = model.like.new_zeros(())
    return {"log_mu": number, "own": model.params, "calls": number.long()}


@dataclass(frozen=True)
class Taped(Algorithm):
    """Learns how near to the common model each client stays, and how long its steps are."""

    loses: bool = False  # whether the client with a single sample fails in round 0, in the last taped call

    def server_init(self, model: Model) -> Tree:
        return {"w": tree_map(lambda v: v + 0.1, model.params), "lr": model.like.new_tensor([0.1, 0.2, 0.15, 0.05])}

    def client_init(self, me: ClientContext) -> Tree:
        own = {k: v + 0.01 * me.n for k, v in me.model.params.items()}
        return {"log_mu": -1 + 0.1 * me.n, "own": own, "calls": (0 * me.n).long()}

    @on_client(sends=(MODEL, COUNT))
    def cell(self, me: ClientContext, w: Params, lr: Tensor) -> tuple[Tree, Tree]:
        own = me.sgd(me.state["own"], epochs=EPOCHS, prox=(w, me.state["log_mu"].exp()), lr=lr)
        return me.state | {"own": own, "calls": me.state["calls"] + 1}, (own, me.n)

    @on_client(sends=NUMBER)
    def shrink(self, me: ClientContext) -> tuple[Tree, Tree]:
        own = {k: v * torch.sigmoid(me.state["log_mu"]) for k, v in me.state["own"].items()}
        return me.state | {"own": own}, me.n

    @on_client(sends=NUMBER)
    def outer(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        own = me.state["own"]
        apart = sum(((own[k] - w[k]) ** 2).sum() for k in own)
        loss = me.loss(own, "val") + 0.5 * me.loss(w, "train") + 0.3 * apart
        if self.loses and me.round == 0:
            loss = torch.where(me.n < 2, torch.nan, loss)
        return me.state, loss

    @on_client(sends=ReplySpec("gradient", _private))
    def reveal(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.grad

    def round(self, fed: Federation, server: Tree) -> Tree:
        watched = fed.tape({"w": server["w"], "lr": server["lr"]})
        w, lr = watched["w"], fed.scatter(watched["lr"])
        for _ in range(CELLS):
            w = fed.mean(*fed.map(self.cell, w, lr))
        fed.map(self.shrink)  # of no use to the server, but the private states go through it
        loss = fed.sum(fed.map(self.outer, w))
        fed.map(self.shrink)  # after the loss: must not be in its gradient
        gradient = fed.backward(loss)
        private = fed.gather(fed.map(self.reveal), "gradients")
        return {"loss": loss, "gradient": gradient, "private": private}


def federation(
    engine: str, solver: Solver, model: str = "linear", task: Any = "regression", **options: Any
) -> Federation:
    data = make_data(task)
    return federate(Taped(**options), data, make_model(model, data), engine, solver)


def one_round(fed: Federation, round: int = 0) -> Tree:
    setting = fed.engine.experiment
    return fed.run_round(round, range(4), setting.algorithm.server_init(setting.model))


def central(data: FederatedData, solver: Solver, server: Tree, mine: list[Tree]) -> Tensor:
    """The same loss in plain torch, everybody's data in one graph; a linear model and whole batches."""

    def loss_of(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ params["out.weight"].T + params["out.bias"] - y) ** 2).mean()

    def train(params: Params, center: Params, mu: Tensor, lr: Tensor, x: Tensor, y: Tensor) -> Params:
        first = {k: torch.zeros_like(v) for k, v in params.items()}
        second = dict(first)
        for t in range(1, EPOCHS + 1):
            error = x @ params["out.weight"].T + params["out.bias"] - y
            slope = {"out.weight": 2 / error.numel() * error.T @ x, "out.bias": 2 / error.numel() * error.sum(0)}
            after = {}
            for k, v in params.items():
                g = slope[k] + mu * (v - center[k]) + solver.weight_decay * v
                if solver.optimizer == "adam":
                    first[k], second[k] = 0.9 * first[k] + 0.1 * g, 0.999 * second[k] + 0.001 * g**2
                    g = first[k] / (1 - 0.9**t) / (second[k] / (1 - 0.999**t) + 1e-16) ** 0.5
                else:
                    first[k] = g = solver.momentum * first[k] + g
                after[k] = v - lr * g
            params = after
        return params

    w, counts = server["w"], data.train.sizes.to(F64)
    own = [m["own"] for m in mine]
    mu = [m["log_mu"].exp() for m in mine]
    for _ in range(CELLS):
        own = [train(own[i], w, mu[i], server["lr"][i], *data.train.of(i)) for i in range(4)]
        w = {k: torch.stack([n * o[k] for n, o in zip(counts, own, strict=True)]).sum(0) / counts.sum() for k in w}
    total = torch.zeros((), dtype=F64)
    for i in range(4):
        small = {k: v * torch.sigmoid(mine[i]["log_mu"]) for k, v in own[i].items()}
        x, y = data.val.of(i)
        total = total + (loss_of(small, x, y) if len(x) else 0) + 0.5 * loss_of(w, *data.train.of(i))
        total = total + 0.3 * sum(((small[k] - w[k]) ** 2).sum() for k in w)
    return total


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_equals_central_autograd(engine: str, solver: str) -> None:
    fed = federation(engine, SOLVERS[solver])
    setting = fed.engine.experiment

    def leaf(v: Tensor) -> Tensor:
        return v.clone().requires_grad_() if v.is_floating_point() else v.clone()

    server = tree_map(leaf, setting.algorithm.server_init(setting.model))
    mine = [tree_map(leaf, s["state"]) for s in states(fed).values()]
    loss = central(setting.data, SOLVERS[solver], server, mine)
    loss.backward()
    out = one_round(fed)
    assert_equal(out["loss"], loss.detach(), 1e-12)
    assert_equal(out["gradient"], tree_map(lambda v: v.grad, server))
    for i, wanted in enumerate(mine):
        found = tree_map(lambda v, i=i: v[i], out["private"])
        assert_equal(found, tree_map(lambda v: v.grad if v.is_floating_point() else 0 * v, wanted))
    assert min(float(v.abs().max()) for v in (out["gradient"]["lr"], out["private"]["log_mu"])) > 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_equals_finite_differences(engine: str, solver: str) -> None:
    out = one_round(several_batches(engine, solver))
    gradient = dict(items({"server": out["gradient"], "private": out["private"]}))
    found = slopes(solver)
    assert len(found) == 6  # the common model and the steps; near to it, and the own models
    for path, (direction, slope) in found.items():
        assert slope == pytest.approx(float((gradient.pop(path) * direction).sum()), rel=1e-6, abs=1e-9), path
    assert not any(bool(v.any()) for v in gradient.values())  # of integers


def several_batches(engine: str, solver: str) -> Federation:
    """With several batches per epoch and a loss that is not quadratic."""
    return federation(engine, replace(SOLVERS[solver], batch_size=4), task="classification")


@cache
def slopes(solver: str) -> dict[str, tuple[Tensor, float]]:
    """How the loss of a round changes along a random direction of each tensor, by finite differences."""
    fed = several_batches("vmap", solver)  # its losses are those of the others: test_engines_agree
    setting = fed.engine.experiment
    server = setting.algorithm.server_init(setting.model)
    rows = tree_map(torch.clone, fed.engine.get_states())

    def loss(server: Tree, rows: Tree) -> float:
        fed.engine.set_states(rows)
        return float(fed.run_round(0, range(4), server)["loss"])

    point = dict(items({"server": server, "private": rows["state"]}))
    eps = 1e-5
    generator = torch.Generator().manual_seed(0)
    found = {}
    for path, value in point.items():
        if value.is_floating_point():
            direction = torch.randn(value.shape, dtype=F64, generator=generator)
            values = []
            for sign in (1, -1):
                moved = {k: v.clone() for k, v in point.items()}
                moved[path] += sign * eps * direction
                values.append(loss(*_put_back(moved, server, rows)))
            found[path] = direction, (values[0] - values[1]) / (2 * eps)
    return found


def _put_back(flat: dict[str, Tensor], server: Tree, rows: Tree) -> tuple[Tree, Tree]:
    w = {k: flat[f"server/w/{k}"] for k in server["w"]}
    own = {k: flat[f"private/own/{k}"] for k in server["w"]}
    state = {"own": own, "log_mu": flat["private/log_mu"], "calls": flat["private/calls"]}
    return {"w": w, "lr": flat["server/lr"]}, {"state": state, "buffers": rows["buffers"]}


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "conv": {"shape": (1, 6, 6)},
    "normed": {"sizes": EVEN_SIZES},
    "normed-mean": {"sizes": EVEN_SIZES},
}


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_engines_agree(model: str, engine: str) -> None:
    data = make_data(**MODELS[model])
    name, _, policy = model.partition("-")
    found, wanted = (
        federate(Taped(), data, make_model(name, data, "mean" if policy else "private"), e) for e in (engine, "loop")
    )
    assert_equal(one_round(found), one_round(wanted))
    assert_equal(states(found), states(wanted))


@dataclass(frozen=True)
class Passing(Algorithm):
    """Replies, one of them an integer, go back to whom they came from without the server looking."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"a": 0.1 * me.n}

    @on_client(sends=(NUMBER, ReplySpec("integer", lambda algorithm, model: torch.zeros((), dtype=torch.int64))))
    def there(self, me: ClientContext, k: Tensor) -> tuple[Tree, Tree]:
        return me.state, (k * me.state["a"] ** 2, me.n.long() + k)

    @on_client(sends=NUMBER)
    def back(self, me: ClientContext, mine: Tensor, k: Tensor) -> tuple[Tree, Tree]:
        return me.state, mine**2 * k

    @on_client(sends=NUMBER)
    def reveal(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.grad["a"]

    def round(self, fed: Federation, server: Tree) -> Tree:
        scale = fed.tape(server)
        loss = scale * fed.sum(fed.map(self.back, *fed.map(self.there, torch.tensor(2))))
        return {"scale": fed.backward(loss), "a": fed.gather(fed.map(self.reveal), "a")}


@pytest.mark.parametrize("cohort", [(0, 1, 2, 3), (3, 0, 2)])
@pytest.mark.parametrize("engine", EVERYWHERE)
def test_replies_that_return_to_their_clients(engine: str, cohort: tuple[int, ...]) -> None:
    data = make_data()
    fed = federate(Passing(), data, make_model("linear", data), engine)
    out = fed.run_round(0, cohort, torch.tensor(1.5, dtype=F64))
    n = data.train.sizes[list(cohort)].to(F64)
    assert_equal(out["scale"], (4 * (0.1 * n) ** 4 * (n + 2)).sum())
    assert_equal(out["a"], 1.5 * 16 * (0.1 * n) ** 3 * (n + 2))


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_the_backward_pass_is_traffic(engine: str) -> None:
    fed = federation(engine, SOLVERS["sgd"])
    one_round(fed)
    assert fed.traffic.trips == 5 + 4 + 1  # there, back (not through the call after the loss), and the look at grads
    wire = federation("wire", SOLVERS["sgd"])
    one_round(wire)
    assert (fed.traffic.up, fed.traffic.down) == (wire.engine.up, wire.engine.down)  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_looks_and_integers(engine: str) -> None:
    fed = federation(engine, SOLVERS["sgd"])
    one_round(fed)
    assert fed.record.gathered == {"gradients"}
    assert [int(s["state"]["calls"]) for s in states(fed).values()] == [CELLS] * 4


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_a_lost_client_ends_a_taped_round(engine: str) -> None:
    fed = federation(engine, SOLVERS["sgd"], loses=True)
    before = states(fed)
    with pytest.raises(RoundAbandoned, match=r"\b3\b.*\b4\b.*outer"):
        one_round(fed)
    assert_equal(states(fed), before, tolerance=0)
    assert [f.client for f in fed.record.faults] == ["bo"]
    # the next round has nothing of the lost one's tape
    assert_equal(one_round(fed, round=1), one_round(federation(engine, SOLVERS["sgd"]), round=1), tolerance=0)


@dataclass(frozen=True)
class Misused(Algorithm):
    """Goes back over a tape that is not there, or twice."""

    twice: bool = False

    @on_client(sends=NUMBER)
    def one(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.n

    def round(self, fed: Federation, server: Tree) -> Tree:
        start = fed.tape(torch.ones((), dtype=F64)) if self.twice else torch.ones((), dtype=F64)
        loss = fed.sum(fed.map(self.one)) * start
        if self.twice:
            assert float(fed.backward(loss)) == 29
        fed.backward(loss)
        return server


@pytest.mark.parametrize("twice", [False, True])
def test_backward_without_tape(twice: bool) -> None:
    data = make_data()
    fed = federate(Misused(twice), data, make_model("linear", data))
    with pytest.raises(RuntimeError, match=r"fed\.backward without fed\.tape"):
        fed.run_round(0, range(4), {})
