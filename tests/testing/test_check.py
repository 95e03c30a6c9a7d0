"""Algorithms from outside the tree are held to the same promises, and told in words what they break."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

from fedtailor import COUNT, MODEL, Algorithm, ClientContext, Federation, Model, Params, Tree, on_client, testing
from fedtailor.cli.main import app
from fedtailor.errors import ConfigError
from fedtailor.testing import BrokenPromise, _attempts, check_algorithm, contract
from fedtailor.testing.contract import CASES
from fedtailor.testing.federations import ENGINES

CALLS: list[int] = []


@dataclass(frozen=True)
class Average(Algorithm):
    """FedAvg, the base of what is broken here in one place each."""

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params}

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, (me.sgd(w), me.n)

    def round(self, fed: Federation, server: Tree) -> Tree:
        return {"w": fed.mean(*fed.map(self.local, server["w"]))}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["w"]


@dataclass(frozen=True)
class ReadsPadding(Average):
    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, ({k: v + me.train.x.mean() for k, v in me.sgd(w).items()}, me.n)


@dataclass(frozen=True)
class Remembers(Average):
    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        CALLS.append(1)
        return me.state, ({k: v + 1e-3 * len(CALLS) for k, v in me.sgd(w).items()}, me.n)


@dataclass(frozen=True)
class FirstCounts(Average):
    def round(self, fed: Federation, server: Tree) -> Tree:
        models, _ = fed.map(self.local, server["w"])
        return {"w": {k: v[0] for k, v in fed.gather(models, "models").items()}}


@dataclass(frozen=True)
class CountsAll(Average):
    def round(self, fed: Federation, server: Tree) -> Tree:
        w = fed.mean(*fed.map(self.local, server["w"]))
        return {"w": {k: v * (1 + 0.1 * fed.clients) for k, v in w.items()}}


@dataclass(frozen=True)
class Says(CountsAll):
    counts_all: ClassVar[bool] = True


@dataclass(frozen=True)
class Idle(Average):
    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.mean(*fed.map(self.local, server["w"]))
        return server


@dataclass(frozen=True)
class Table(Average):
    """Tables of the server by client and by pair of clients, as position in the list."""

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params, "n": torch.zeros(0), "near": torch.zeros(0)}

    def round(self, fed: Federation, server: Tree) -> Tree:
        models, counts = fed.map(self.local, server["w"])
        n = torch.stack(list(fed.gather(counts, "sample counts")))
        return {"w": fed.mean(models, counts), "n": n, "near": (n[:, None] - n).abs()}


@dataclass(frozen=True)
class DeclaredTable(Table):
    by_client: ClassVar[tuple[str, ...]] = ("n",)
    by_pair: ClassVar[tuple[str, ...]] = ("near",)


@dataclass(frozen=True)
class BatchNormOnly(Average):
    def check(self, model: Model, task: str) -> None:
        if not model.private_buffers:
            raise ConfigError("algorithm.name: needs a model with BatchNorm")


@dataclass(frozen=True)
class ServesNothing(Average):
    def check(self, model: Model, task: str) -> None:
        raise ConfigError("algorithm.name: nothing fits")


BROKEN: dict[str, tuple[Callable[[], None], str]] = {
    "padding": (lambda: contract.engines_agree(ReadsPadding(), "classification", "vmap"), "padded samples"),
    "memory": (lambda: contract.saved_states_continue(Remembers(), "loop"), "outside me.state"),
    "order": (lambda: contract.order_is_irrelevant(FirstCounts(), "loop"), "place of a client"),
    "number": (lambda: contract.a_part_is_a_federation(CountsAll(), "loop"), "counts_all = True"),
    "idle": (lambda: contract.something_is_learned(Idle(), "classification"), "neither .* has changed"),
    "table": (lambda: contract.order_is_irrelevant(Table(), "loop"), "in by_client"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_promise_is_told_in_words(case: str) -> None:
    attempt, words = BROKEN[case]
    with pytest.raises(BrokenPromise, match=words):
        attempt()


def test_what_is_not_promised_is_not_checked() -> None:
    contract.order_is_irrelevant(DeclaredTable(), "loop")
    assert contract.part_is_promised(Says())
    tried = {where for promise, where, reason, _ in _attempts(BatchNormOnly()) if not reason}
    assert tried & CASES.keys() == {"batchnorm-private", "batchnorm-mean"}


def test_all_that_is_broken_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [("order", engine, "", partial(contract.order_is_irrelevant, FirstCounts(), engine)) for engine in ENGINES]
    monkeypatch.setattr(testing, "_attempts", lambda algorithm: orders)
    with pytest.raises(BrokenPromise, match="FirstCounts breaks 4 of 4") as told:
        check_algorithm(FirstCounts)
    assert str(told.value).count("\n- order (") == 4
    with pytest.raises(ConfigError, match="ServesNothing"):
        check_algorithm(ServesNothing())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole contract of a method that keeps most of it."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["check", "tests.testing.test_check:FirstCounts", "--json"])
    assert result.exit_code == 1
    findings = json.loads(result.stdout)
    assert {"promise", "where", "verdict", "words"} == set(findings[0])
    assert {f["promise"] for f in findings if f["verdict"] == "broken"} == {"order of clients is irrelevant"}
    result = CliRunner().invoke(app, ["check", "fedavg", "--set", "local.lr=1"])
    assert isinstance(result.exception, ConfigError)
