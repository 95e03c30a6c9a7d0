"""A site alone: what it refuses, what it answers from memory, what it keeps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor import __version__
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core import codec
from fedtailor.core.trees import Tree, items
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import read_json, write_json
from fedtailor.flare.protocol import ENVELOPE, PROTOCOL, config_for, data_schema, promise, unset_keys
from fedtailor.flare.server import SiteRpc
from fedtailor.flare.site import AUDIT, SERVER, SiteService, SiteState, read_site
from tests.flare.sites import write_sites
from tests.helpers import make_data
from tests.small import config

SESSION = b"s" * 16
HELLO = {
    "op": "hello",
    "protocol": PROTOCOL,
    "version": __version__,
    "run": "run-1",
    "model": "mlp",
    "rounds": 3,
    "seed": 0,
}


class Asked:
    """A site, and the server's side of the talk with it."""

    def __init__(self, root: Path, algorithm: str = "fedrep", **policy: Any) -> None:
        (root / "all").mkdir(parents=True, exist_ok=True)
        self.file = write_sites(root / "all", make_data(names=["ada"]), **policy)["ada"]
        self.folder = self.file.parent / "private"
        self.config: RunConfig = config(f"algorithm.name={algorithm}", "data={source='sites'}", "model.dtype=float64")
        self.algorithm = algorithm
        self.number = 0
        self.restart()

    def restart(self) -> None:
        self.site = SiteService(read_site(self.file), "ada")
        self.number = 0

    def ask(self, header: dict[str, Any], tree: Tree = None, caller: str = SERVER) -> tuple[dict[str, Any], Tree]:
        self.number += 1
        return self.raw(self.number, header, tree, caller=caller)

    def raw(
        self, number: int, header: dict[str, Any], tree: Tree = None, session: bytes = SESSION, caller: str = SERVER
    ) -> tuple[dict[str, Any], Tree]:
        request = ENVELOPE.pack(session, number) + codec.encode(header, tree)
        return codec.decode(self.site.answer(caller, request))

    def hello(self, **changes: Any) -> dict[str, Any]:
        about: dict[str, Any] = {"algorithm": self.algorithm, "model": self.config.model.name}
        about |= {"rounds": self.config.rounds, "seed": self.config.seed}
        return self.ask(HELLO | about | changes)[0]

    def start(self, run: str = "run-1", **changes: Any) -> dict[str, Any]:
        self.hello(run=run)
        assert self.site._data is not None
        self.experiment = assemble(self.config, self.site._data)
        header = {
            "op": "start",
            "config": config_for(self.config, 0),
            "client": 0,
            "schema": data_schema(self.site._data),
            "promise": promise(self.experiment) | changes,
            "first": 0,
        }
        return self.ask(header)[0]

    def begin(self, round: int, kept: int) -> dict[str, Any]:
        return self.ask({"op": "begin", "round": round, "kept": kept, "needed": []})[0]

    def call(self, round: int = 1, function: str = "local", **changes: Any) -> tuple[dict[str, Any], Tree]:
        return self.ask(self.request(round, function) | changes, (self.experiment.model.body,))

    def request(self, round: int = 1, function: str = "local") -> dict[str, Any]:
        return {"function": function, "round": round, "call": 0, "placed": [False], "taped": False}

    def states(self) -> dict[str, torch.Tensor]:
        assert self.site._job is not None
        return {k: v.clone() for k, v in items(self.site._job.client.inside.get_states())}


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    made = Asked(tmp_path)
    assert "error" not in made.start()
    assert "error" not in made.begin(1, 0)
    return made


@pytest.mark.parametrize(
    ("changes", "policy", "why"),
    [
        ({"algorithm": "ditto"}, {"algorithms": ["fedrep"]}, 'algorithm "ditto" is not in the policy'),
        ({"algorithm": "os:system"}, {}, 'algorithm "os:system" is not in the policy'),
        ({"model": "os:system"}, {}, 'model "os:system" is not in the policy'),
        ({"rounds": 200}, {"max_rounds": 100}, "200 rounds"),
        ({}, {"min_samples": 10}, "this site has fewer than 10 training samples"),
        ({"protocol": 2, "version": "0.9.1"}, {}, "the server speaks protocol 2 (fedtailor 0.9.1), this site 1"),
        ({"protocol": "1"}, {}, "the server speaks protocol 1"),
        ({"run": "../../etc"}, {}, '"../../etc" cannot be the name of a run'),
        ({"data": "/etc/passwd"}, {}, 'hello with "data" is not known'),
    ],
)
def test_a_run_that_is_refused(changes: dict[str, Any], policy: dict[str, Any], why: str, tmp_path: Path) -> None:
    made = Asked(tmp_path, **policy)
    answer = made.hello(**changes)
    assert answer["refused"].startswith(why)
    assert answer["error"].startswith("ada refuses: ")
    record = [json.loads(line) for line in (made.folder / AUDIT).read_text().splitlines()]
    assert record[-1]["refused"] == answer["refused"]


def test_what_the_policy_does_not_let_out(tmp_path: Path) -> None:
    answer = Asked(tmp_path, sends=["sample count"]).start()
    assert 'sends "body"' in answer["refused"]


@pytest.mark.parametrize("part", ["protocol", "streams", "algorithm", "options", "sends", "sums"])
def test_a_promise_that_differs(part: str, tmp_path: Path) -> None:
    assert Asked(tmp_path).start(**{part: "other"})["refused"].startswith(f"the server's {part} is not this site's")


def test_gradients_need_a_word_of_their_own(tmp_path: Path) -> None:
    made = Asked(tmp_path, sends=["body", "sample count"])
    made.start()
    made.begin(1, 0)
    assert "error" not in made.call()[0]
    assert made.call(taped=True)[0]["refused"].startswith('a taped call sends "gradients"')
    assert made.ask({"round": 1, "call": 0}, None)[0]["refused"].startswith('a taped call sends "gradients"')


@pytest.mark.parametrize("function", ["client_init", "personal", "round", "__init__", "nothing"])
def test_a_function_that_is_not_declared(function: str, asked: Asked) -> None:
    assert asked.call(function=function)[0]["refused"] == f'"{function}" is not a client function of FedRep'


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"op": "get_states"}, 'no operation "get_states"'),
        ({"op": "evaluate", "round": 1, "splits": [], "keep": "", "models": True}, 'evaluate with "models" is not'),
        ({"op": "evaluate", "round": 1, "splits": [], "keep": "../x"}, '"../x" is not a kind'),
        ({"op": "keep", "round": 7}, "round 7 was not begun"),
        ({"op": "begin", "round": 5000, "kept": 0, "needed": []}, "round 5000"),
    ],
)
def test_an_operation_that_is_not_declared(header: dict[str, Any], why: str, asked: Asked) -> None:
    assert asked.ask(header, asked.experiment.model.body)[0]["refused"].startswith(why)


def test_a_reply_other_than_declared_does_not_leave(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = FedRep
    honest = kind.local

    def tells(self: Any, me: Any, body: Any) -> Any:
        state, (body, n) = honest(self, me, body)
        return state, (body | state, n)

    tells.sends = honest.sends  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "local", tells)
    answer, tree = asked.call()
    assert tree is None
    assert 'undeclared key "0/out.bias"' in answer["refused"]


def test_only_the_server_may_call(asked: Asked) -> None:
    assert asked.ask({"op": "finish"}, caller="bo")[0]["refused"] == '"bo" called; only the server may'


def test_nothing_before_a_run_was_started(tmp_path: Path) -> None:
    made = Asked(tmp_path)
    assert made.begin(1, 0)["refused"] == "begin before a run was started"
    assert made.ask(made.request())[0]["refused"] == "a call before a run was started"


def test_a_repeated_request_is_answered_from_memory(asked: Asked) -> None:
    first = asked.call()
    before = asked.states()
    again = asked.raw(asked.number, asked.request(), (asked.experiment.model.body,))
    assert first[0] == again[0]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(items(first[1]), items(again[1]), strict=True))
    assert all(torch.equal(before[k], v) for k, v in asked.states().items())
    assert not torch.equal(before["state/out.weight"], asked.experiment.model.head["out.weight"][None])


def test_late_and_foreign_requests_are_refused(asked: Asked) -> None:
    before = asked.states()
    late = asked.raw(asked.number - 1, asked.request(), (asked.experiment.model.body,))[0]
    assert late["refused"] == f"request {asked.number - 1} is late, {asked.number} was answered"
    other = asked.raw(asked.number + 1, asked.request(), (asked.experiment.model.body,), session=b"x" * 16)[0]
    assert other["refused"] == "the request is of another session"
    assert asked.call(round=2)[0]["refused"] == "round 2 was not begun; the current one is 1"
    assert all(torch.equal(before[k], v) for k, v in asked.states().items())


def test_a_site_goes_back_with_the_server(asked: Asked) -> None:
    kept = {0: asked.states()}
    for round in (1, 2, 3):
        asked.begin(round, round - 1)
        asked.call(round)
        assert asked.ask({"op": "keep", "round": round})[0]["kept"] == round
        kept[round] = asked.states()
    asked.restart()  # a new job
    assert asked.start()["kept"] == [0, 2, 3]  # the first state can be made again
    asked.begin(3, 2)
    assert all(torch.equal(kept[2][k], v) for k, v in asked.states().items())
    asked.call(3)
    assert all(torch.equal(kept[3][k], v) for k, v in asked.states().items())  # the same round again, the same state
    assert "RunError" in asked.begin(4, 1)["error"]  # what is gone is not made up


def test_what_was_not_kept_is_undone_by_the_next_round(asked: Asked) -> None:
    before = asked.states()
    asked.call(1)
    assert not all(torch.equal(before[k], v) for k, v in asked.states().items())
    asked.begin(2, 0)
    assert all(torch.equal(before[k], v) for k, v in asked.states().items())
    assert asked.ask({"op": "keep", "round": 2})[0]["kept"] == 0  # nothing has changed


def test_another_configuration_under_the_name_of_a_run(asked: Asked) -> None:
    asked.restart()
    asked.config = asked.config.model_copy(update={"seed": 7})
    asked.hello()
    assert "run-1" in asked.start()["refused"]


def test_vault(tmp_path: Path) -> None:
    vault = SiteState(tmp_path / "states")
    for round in (-3, 0, 12):
        vault.keep(round, {"v": torch.full((2,), float(round))})
    assert vault.rounds() == [-3, 0, 12]
    assert vault.read(-3)["v"].tolist() == [-3, -3]
    vault.forget_but({0, 12})
    assert vault.rounds() == [0, 12]
    with pytest.raises(RunError, match=r"-3.*\b0\b.*\b12\b"):
        vault.read(-3)
    (tmp_path / "states" / "state+000012.safetensors").write_bytes(b"changed")
    with pytest.raises(RunError, match="changed since it was written"):
        vault.read(12)
    assert (tmp_path / "states").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[data]\npath = 'x.safetensors'", "policy: Field required"),
        ("[data]\npath = 'x.safetensors'\n[policy]\nalgorithm = []", "policy.algorithms: Field required"),
        ("[data]\npath = 'x.safetensors'\n[policy]\nalgorithms = []\nsends = []\nsend = 1", "policy.send: unknown key"),
        ("[data", "Expected"),
    ],
)
def test_a_file_that_is_wrong(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"site.toml: {why}"):
        read_site(tmp_path / "site.toml")


class Slow:
    """A link whose sites answer when they are let."""

    def __init__(self) -> None:
        self.sites: tuple[str, ...] = ("ada", "bo")
        self.alive = {"ada": True, "bo": True}
        self.pings = 0

    def limit(self, most: int) -> None:
        """Nothing is received."""

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        if len(request) == ENVELOPE.size:
            self.pings += 1
            if not self.alive[site]:
                raise TimeoutError("no sign of life")
            return b""
        until = time.monotonic() + (1.0 if self.alive[site] else 60.0)
        while time.monotonic() < until:
            time.sleep(0.01)
        return b"done"


def test_a_long_computation_is_waited_for_and_a_dead_site_is_not() -> None:
    link = Slow()
    lines = SiteRpc(link, deadline=60, silence=0.2)
    link.alive["bo"] = False
    replies = lines.ask([("ada", b"work"), ("bo", b"work")])
    assert replies["ada"] == b"done"
    assert isinstance(replies["bo"], TimeoutError)
    assert lines.away == {"bo": "does not answer (no sign of life)"}
    assert link.pings > 2
    assert isinstance(lines.ask([("bo", b"work")])["bo"], ConnectionError)  # at once
    link.alive["bo"] = True
    until = time.monotonic() + 60
    while lines.away and time.monotonic() < until:
        lines.take_back()
        time.sleep(0.01)
    assert lines.away == {}


def test_another_minor_version_takes_part(tmp_path: Path) -> None:
    """Its configuration has a key that this site's version lacks; at its default it changes nothing."""
    made = Asked(tmp_path)
    made.hello(version="0.9.0")
    assert made.site._data is not None
    made.experiment = assemble(made.config, made.site._data)
    config = config_for(made.config, 0)
    config["federation"]["planets"] = 8
    config["moons"] = {}
    header = {"op": "start", "client": 0, "schema": data_schema(made.site._data), "first": 0}
    header |= {"promise": promise(made.experiment), "config": config}
    assert "error" in made.ask(header)[0]
    del config["moons"]
    assert "error" in made.ask(header)[0]
    assert "error" not in made.ask(header | {"unset": ["federation.planets"]})[0]


def test_a_run_of_an_earlier_version_goes_on(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.call()
    asked.ask({"op": "keep", "round": 1})
    path = asked.folder / "run-1" / "run.json"
    stored = read_json(path)
    del stored["config"]["federation"]["threads"]  # a key that the earlier version did not have yet
    write_json(path, stored)
    for module in ("protocol", "kits", "server"):
        monkeypatch.setattr(f"fedtailor.flare.{module}.__version__", "0.2.1")
    asked.restart()
    assert asked.start()["kept"] == [0, 1]
    assert "error" not in asked.begin(2, 1)


def test_what_the_server_left_at_its_default_is_listed() -> None:
    keys = unset_keys(config("federation.threads=3"))
    assert "federation.threads" not in keys
    assert "federation.max_norm" in keys
    assert "local.lr" not in keys
