"""Replies that training makes where the server reads them: nothing is lost, swapped or unseen by that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.core.algorithm import MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.reduce import Limits
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.pool import worker
from fedtailor.engines.pool.pool import Pool
from fedtailor.engines.pool.shared_memory import Layout
from fedtailor.engines.pool.worker import ClientTask
from fedtailor.training.kernels.output_buffers import OutputBuffers
from tests.helpers import F64, SOLVER, assert_equal, everything, make_data, make_model

EQUAL = dict.fromkeys(("ada", "bo", "cy", "di", "ed", "flo"), (8, 2, 2))


@dataclass(frozen=True)
class Own(Algorithm):
    """Trains twice and keeps one of the two: what it sends was made first, or last, or from what was made."""

    sends: str = "first"

    def server_init(self, model: Model) -> Params:
        return model.params

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    @on_client(sends=(MODEL, MODEL, NUMBER))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        first = me.sgd(w)
        last = me.sgd(me.state, lr=0.02)
        sent = {
            "first": (first, last),
            "last": (last, first),
            "twice": (first, first),
            "made of it": (tree_map(lambda v: v.flip(0), first), last),
        }[self.sends]
        return first, (*sent, me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        a, b, n = fed.map(self.local, w)
        fed.report(samples=fed.sum(n))
        return tree_map(lambda x, y: 0.7 * x + 0.3 * y, fed.mean(a, n), fed.mean(b))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return me.state


def made(engine: Any, limits: Limits | None = None) -> tuple[dict[str, Tensor], Federation]:
    engine.start()
    fed = Federation(engine, limits or Limits())
    server = engine.experiment.algorithm.server_init(engine.experiment.model)
    for round, cohort in enumerate(([0, 1, 2, 3, 4, 5], [1, 3, 4], [0, 1, 2, 5])):
        server = fed.run_round(round, cohort, server)
    return everything(fed, server), fed


def setting(algorithm: Algorithm) -> Experiment:
    data = make_data(sizes=EQUAL)
    return Experiment(algorithm, make_model("mlp", data), data, SOLVER, 3)


@pytest.mark.parametrize("sends", ["first", "last", "twice", "made of it"])
def test_whatever_is_sent_arrives(sends: str) -> None:
    pool = Pool(setting(Own(sends)), 2, chunk=6)
    found, fed = made(pool)
    pool.close()
    wanted, _ = made(InProcess(setting(Own(sends))))
    assert fed.record.faults == []
    assert_equal(found, wanted, 1e-10)


@dataclass(frozen=True)
class Large(Algorithm):
    """One client's model is too large, another's is no number."""

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, me.sgd(w, lr=me.n * 0 + torch.where(me.uniform(1)[0] > 0.5, 1e3, 0.01))

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w


def test_a_norm_that_was_found_on_the_way_is_the_norm() -> None:
    limits = Limits(max_norm=50.0)
    pool = Pool(setting(Large()), 2, chunk=6)
    found, fed = made(pool, limits)
    pool.close()
    wanted, by_loop = made(InProcess(setting(Large())), limits)
    assert [(f.client, f.round, f.reason) for f in fed.record.faults] == [
        (f.client, f.round, f.reason) for f in by_loop.record.faults
    ]
    assert len(fed.record.faults) > 2
    assert_equal(found, wanted, 1e-8)


def test_it_is_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[list[bool]] = []
    delivered = worker.Worker._deliver

    def watched(self: Any, reply: Any, there: list[bool], *rest: Any) -> Any:
        at.append(there)
        return delivered(self, reply, there, *rest)

    monkeypatch.setattr(worker.Worker, "_deliver", watched)
    pool = Pool(setting(Own()), 1, chunk=6)
    pool.start()
    inside = pool._inside

    model = pool.experiment.model
    message = pool._share((model.params,))
    layout = Layout.of(inside.reply_layout("local").tree, 6)
    region = inside.regions.take(layout.size)
    request = {
        "do": "call",
        "tape": 0,
        "call": {"function": "local", "round": 1, "call": 0, "placed": [False], "taped": False},
        "message": message.content,
        "tasks": [ClientTask(c, c, pool._where.now[c], pool._where.fresh(), at=region.at, row=c) for c in range(6)],
    }
    answers, _ = inside.handle(request)
    pool.close()
    leaves_of_a_model = len(model.params)
    assert at == [[True] * 2 * leaves_of_a_model + [False]]  # both models, but not the number
    assert all(answer["norm"] > 0 for answer in answers)


def test_stacks_are_taken_once_and_only_where_they_fit() -> None:
    places = [torch.zeros(2, 3, dtype=F64), torch.zeros(2, 4), torch.zeros(2, 3)]
    into = OutputBuffers(places)
    assert into.take(torch.ones(2, 3)) is places[2]
    assert into.take(torch.ones(2, 3)) is not places[2]
    assert into.take(torch.ones(2, 4)) is places[1]
    places[1][0] = 2.0
    into.record_norms(places[1], slice(0, 1))
    assert into.norms[places[1].data_ptr()][0] == 4.0
