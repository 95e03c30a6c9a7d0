"""Mistakes in client functions and models: each gave a wrong number without a word."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor as ft
from fedtailor.core.algorithm import COUNT, MODEL, NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import torch_stream
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ClientError, RunError
from tests.helpers import EVERYWHERE, F64, assert_equal, everything, federate, make_data, make_model, run, states

ALL = pytest.mark.parametrize("engine", EVERYWHERE)


@dataclass(frozen=True)
class Writing(Algorithm):
    """Writes into what it is given: its state, the message, or its samples."""

    where: str = "state"

    def server_init(self, model: Model) -> Tree:
        return model.params

    def client_init(self, me: ClientContext) -> Tree:
        return {"n": torch.zeros_like(me.n)}

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        if self.where == "state":
            me.state["n"] += 1
        elif self.where == "message":
            w["out.bias"] += 1
        else:
            me.train.x.mul_(0)
        return me.state, (me.sgd(w), me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(*fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w


@ALL
@pytest.mark.parametrize(("where", "named"), [("state", "state/n"), ("message", "message/0/out.bias")])
def test_a_write_into_state_or_message_raises(engine: str, where: str, named: str) -> None:
    data = make_data()
    fed = federate(Writing(where), data, make_model("mlp", data), engine)
    with pytest.raises(ClientError, match=f'"{named}" was changed in place'):
        run(fed, 1)
    assert all(float(state["state"]["n"]) == 0 for state in states(fed).values())


@pytest.mark.parametrize("engine", ["loop", "wire", "pool"])
def test_a_write_into_the_samples_raises(engine: str) -> None:
    data = make_data()
    fed = federate(Writing("samples"), data, make_model("mlp", data), engine)
    with pytest.raises(ClientError, match='"train/x" was changed in place'):
        run(fed, 1)


@dataclass(frozen=True)
class ServerWrites(Algorithm):
    """Its round changes the server's state in place."""

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params}

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, w

    def round(self, fed: Federation, server: Tree) -> Tree:
        server["w"]["out.bias"].add_(1)
        return server | {"w": fed.mean(fed.map(self.local, server["w"]))}


def test_a_round_that_writes_into_the_servers_state_raises() -> None:
    data = make_data()
    with pytest.raises(TypeError, match="state of the server"):
        run(federate(ServerWrites(), data, make_model("mlp", data)), 1)


def test_a_message_that_is_changed_before_the_replies_came_raises() -> None:
    @dataclass(frozen=True)
    class Late(ServerWrites):
        def round(self, fed: Federation, server: Tree) -> Tree:
            w = {k: v.clone() for k, v in server["w"].items()}
            replies = fed.map(self.local, w)
            w["out.bias"].add_(1)
            return {"w": fed.mean(replies)}

    data = make_data()
    with pytest.raises(RuntimeError, match="the message was changed in place"):
        run(federate(Late(), data, make_model("mlp", data)), 1)


@dataclass(frozen=True)
class Partly(Algorithm):
    """Trains something that is not the whole model."""

    what: str = "unknown"

    def server_init(self, model: Model) -> Tree:
        return model.params

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        body = {k: v for k, v in w.items() if k not in me.model.head}
        if self.what == "unknown":
            me.sgd(w | {"scale": torch.ones_like(me.n)})
        elif self.what == "missing":
            me.sgd(body)
        elif self.what == "prox":
            me.sgd(w, prox=({"hiden.0.weight": w["hidden.0.weight"]}, 0.1))
        elif self.what == "frozen":
            me.sgd(body, frozen={k: w[k] for k in me.model.head} | {"outt.bias": w["out.bias"]})
        elif self.what == "scalar":
            me.sgd(w, loss=lambda tensors, x, y: F.cross_entropy(me.model(tensors, x, training=True), y))
        return {}, (w, me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(*fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return {k: v for k, v in w.items() if k not in me.model.head} if self.what == "personal" else w


@ALL
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unknown", 'the model has no parameter "scale"'),
        ("missing", '"out.bias" of the model is neither trained nor frozen'),
        ("prox", 'prox or mask has "hiden.0.weight", which is not trained'),
        ("frozen", 'the model has no parameter "outt.bias"'),
        ("scalar", r"loss must give one number per sample, here \d+; it gave shape \[\]"),
    ],
)
def test_what_would_not_be_trained_is_refused_by_name(engine: str, what: str, message: str) -> None:
    data = make_data()
    with pytest.raises(ClientError, match=message):
        run(federate(Partly(what), data, make_model("mlp", data), engine), 1)


@ALL
def test_a_personal_model_without_its_head_is_refused(engine: str) -> None:
    data = make_data()
    fed = federate(Partly("personal"), data, make_model("mlp", data), engine)
    server = run(fed, 1)
    with pytest.raises(ValueError, match=r'the model needs "out\.bias"'):
        list(fed.engine.evaluate(range(4), 1, server, ["val"]))


@dataclass(frozen=True)
class OwnScale(Algorithm):
    """Trains a number that the model does not have, by a loss of its own."""

    def server_init(self, model: Model) -> Tree:
        return {"scale": torch.ones((), dtype=F64)}

    @on_client(sends=(ReplySpec("scale", lambda algorithm, model: {"scale": torch.ones((), dtype=F64)}), COUNT))
    def local(self, me: ClientContext, scale: Params) -> tuple[Tree, Tree]:
        def loss(tensors: Params, x: Tensor, y: Tensor) -> Tensor:
            return (tensors["scale"] * x.sum(1) - 1).square()

        return {}, (me.sgd(scale, loss=loss), me.n)

    def round(self, fed: Federation, scale: Params) -> Params:
        return fed.mean(*fed.map(self.local, scale))


def test_with_an_own_loss_every_key_is_trained() -> None:
    data = make_data()
    trained = {e: run(federate(OwnScale(), data, make_model("mlp", data), e), 1) for e in EVERYWHERE}
    assert float(trained["loop"]["scale"]) != 1.0
    for engine in EVERYWHERE:
        assert_equal(trained[engine], trained["loop"])


@dataclass(frozen=True)
class Twice(Algorithm):
    """Draws twice in one call."""

    @on_client(sends=(NUMBER, NUMBER))
    def draw(self, me: ClientContext) -> tuple[Tree, Tree]:
        return {}, (me.uniform(1)[0], me.uniform(1)[0])

    def round(self, fed: Federation, server: Tree) -> Tree:
        return [fed.gather(part, "numbers") for part in fed.map(self.draw)]


def test_two_draws_of_a_call_differ() -> None:
    data = make_data()
    drawn = {e: run(federate(Twice(), data, make_model("mlp", data), e), 1) for e in EVERYWHERE}
    assert (drawn["loop"][0] != drawn["loop"][1]).all()
    for engine in EVERYWHERE:
        assert_equal(drawn[engine], drawn["loop"])


@dataclass(frozen=True)
class Global(Algorithm):
    """Draws from global generators."""

    which: str = "torch"

    @on_client(sends=NUMBER)
    def draw(self, me: ClientContext) -> tuple[Tree, Tree]:
        if self.which == "torch":
            return {}, torch.randn((), dtype=F64)
        return {}, float(np.random.random()) if self.which == "numpy" else random.random()  # noqa: NPY002

    def round(self, fed: Federation, server: Tree) -> Tree:
        return [fed.gather(fed.map(self.draw), "numbers") for _ in range(2)]


@pytest.mark.parametrize("which", ["torch", "numpy", "python"])
def test_draws_from_global_generators_follow_from_the_seed(which: str) -> None:
    data = make_data()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index] # noqa: NPY002
    drawn = {e: run(federate(Global(which), data, make_model("mlp", data), e), 1) for e in ("loop", *EVERYWHERE)}
    values = torch.stack(drawn["loop"]).flatten()
    assert len(set(values.tolist())) == 8  # each client and call its own
    for engine in EVERYWHERE:
        assert_equal(drawn[engine], drawn["loop"])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index] # noqa: NPY002
    assert random.getstate() == before[2]


class Dropping(nn.Module):
    """Dropout as a layer, as a function, and as noise by hand."""

    head = ("out",)
    kind: ClassVar[str] = "layer"

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(shape[0], 16)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.kind == "layer":
            x = self.drop(x)
        elif self.kind == "function":
            x = F.dropout(x, 0.5, self.training)
        elif self.training:
            x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype)
        return self.out(x)


def dropping(kind: str) -> Model:
    with torch_stream("initial values"):
        module = type("Drops", (Dropping,), {"kind": kind})((4,), 3).to(F64)
    return Model(module, head=["out"])


@pytest.mark.parametrize("kind", ["layer", "function", "noise"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "ditto"])
def test_models_that_draw_are_repeatable_and_equal_on_every_engine(kind: str, algorithm: str) -> None:
    from fedtailor import algorithms

    data = make_data()

    def ran(engine: str) -> dict[str, Any]:
        fed = federate(algorithms.make(algorithm, {}), data, dropping(kind), engine)
        return everything(fed, run(fed, 2))

    wanted = ran("loop")
    assert_equal(ran("loop"), wanted, 0.0)
    for engine in EVERYWHERE:
        assert_equal(ran(engine), wanted)


@dataclass(frozen=True)
class Malformed(Algorithm):
    """Replies that are not what it declares, at every client."""

    how: str = "keys"

    def server_init(self, model: Model) -> Tree:
        return model.params

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        if self.how == "keys":
            return {}, {k: v for k, v in w.items() if k != "out.bias"}
        if self.how == "shape":
            return {}, {k: v[None] for k, v in w.items()}
        return {}, {k: v.half() for k, v in w.items()}

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w


@pytest.mark.parametrize("how", ["keys", "shape", "dtype"])
def test_a_run_whose_replies_are_all_malformed_stops_at_once(how: str, tmp_path: Any) -> None:
    task = {"source": "digits", "clients": 3, "max_samples": 60}
    with pytest.raises(ClientError, match=r"every client failed; the first: .*local: reply "):
        ft.run(Malformed(how), task, rounds=3, out=tmp_path / "run", progress=False)


def test_a_run_of_abandoned_rounds_has_no_result(tmp_path: Any) -> None:
    task = {"source": "digits", "clients": 3, "max_samples": 60}
    settings = {"local.lr": 1e30}
    with pytest.raises(RunError, match="none of its 3 rounds"):
        ft.run("fedavg", task, rounds=3, settings=settings, out=tmp_path / "run", progress=False)


def test_outputs_of_another_shape_than_the_targets_are_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x)[:, 0]  # [n], where targets are [n, 1]

    data = make_data("regression", outputs=1)
    from fedtailor import algorithms

    fed = federate(algorithms.make("fedavg", {}), data, Model(Flat().to(F64)))
    with pytest.raises(ClientError, match=r"outputs have shape \[\d+\], targets \[\d+, 1\]"):
        run(fed, 1)
