"""A federation of sites, both ends real and the network left out: equal to the loop engine, whatever goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor import data as sources
from fedtailor.algorithms import algorithms
from fedtailor.core.context import ClientContext
from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import RunFolder, read_json
from fedtailor.flare import server as flare
from fedtailor.flare.protocol import ENVELOPE
from fedtailor.flare.site import AUDIT, SiteState
from tests.flare.sites import Sites, on_loop, tensors, write_sites
from tests.helpers import assert_equal
from tests.small import CLASSES, COUNTS, DIGITS, NORMED, POLYNOMIAL, config

DUW = ("algorithm.outer_iterations=2", "algorithm.horizon=2")
QUICK = ("federation.silence=0.2", "federation.deadline=5")
LINEAR = ("model.name=linear", "model.dtype=float64")


def configured(algorithm: str, *settings: str) -> RunConfig:
    """A task that an algorithm can serve, on the loop engine."""
    is_linear = algorithm in ("learn2pfed", "empiricalbayes", "jointls", "mocha", "mixedmodel", "linearalone")
    task = POLYNOMIAL if is_linear else DIGITS
    if is_linear:
        task = task | {"model": {}}
        settings = (*LINEAR, *settings)
    if algorithm == "fedbn":
        task = NORMED
    if algorithm == "mixedlogit":
        task, settings = CLASSES, ("algorithm.effects=intercept", "algorithm.steps=2", *settings)
    if algorithm == "mixedpoisson":
        task, settings = COUNTS, ("algorithm.effects=intercept", "algorithm.steps=2", *settings)
    if algorithm in ("fedalt", "feddpa", "fedsa-lora"):
        task = DIGITS | {"model": DIGITS["model"] | {"adapter": {"rank": 2}}}
    if algorithm == "fedeq":
        task = task | {"model": {"name": "deq-mlp", "width": 16, "hidden": 8}}
    if algorithm.startswith("duw"):
        settings = (*DUW, *settings)
    return config(f"algorithm.name={algorithm}", "federation.engine=loop", "rounds=3", *QUICK, *settings, task=task)


class Federated:
    """A run over sites in this process."""

    def __init__(self, root: Path, config: RunConfig, sites: int = 4, **policy: Any) -> None:
        self.root = root
        self.config = config
        data = sources.load(config.data, seed=config.seed)
        self.files = write_sites(root / "sites", data, **policy)
        self.names = data.clients
        self.link = Sites({name: self.files[name] for name in self.names[:sites]})

    def run(self, listener: runner.Listener | None = None) -> RunFolder:
        sites = config("data={source='sites'}").data
        plain = self.config.model_copy(update={"data": sites})
        return flare.coordinate(self.link, plain, "run", self.root / "server", listener)

    @property
    def server(self) -> RunFolder:
        return RunFolder(self.root / "server" / "run")

    def private(self, name: str) -> Path:
        run: str = read_json(self.server.path / flare.ROSTER)["run"]
        return self.root / "sites" / name / "private" / run

    def tensors(self) -> dict[str, Any]:
        return tensors(self.server.path, self.root / "sites")


@pytest.mark.parametrize("algorithm", sorted(algorithms()))
def test_sites_and_loop_agree(algorithm: str, tmp_path: Path) -> None:
    rounds = 1 if algorithms()[algorithm].settles else 2  # who settles in a round has made hundreds of exchanges
    federated = Federated(tmp_path, configured(algorithm, f"rounds={rounds}"))
    folder = federated.run()
    assert folder.results is not None
    assert folder.results["faults"] == 0
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)


def test_results_and_traffic_are_those_of_the_loop(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep"))
    straight = runner.start(federated.config, tmp_path / "loop")
    found, wanted = federated.run().results, straight.results
    assert found is not None
    assert wanted is not None
    for part in ("last", "selected", "traffic", "metric"):
        assert json.dumps(found[part]) == json.dumps(wanted[part])
    assert not (federated.server.path / "personal").exists()


def test_no_byte_of_a_head_leaves(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep"))
    federated.run()
    crossed = b"".join(request + reply for _, request, reply in federated.link.seen)
    heads = [leaf for k, leaf in federated.tensors().items() if k.startswith("state of")]
    bodies = [leaf for k, leaf in federated.tensors().items() if k.startswith("server")]
    assert len(heads) == 4 * 2
    assert all(leaf.numpy().tobytes()[:8] in crossed for leaf in bodies)
    for head in heads:
        values = head.numpy().tobytes()
        assert not any(values[i : i + 8] in crossed for i in range(0, len(values) - 7, 4))


Fault = Callable[[str, dict[str, Any]], None]


def away(site: str, rounds: set[int], op: str = "begin") -> Fault:
    """A site that does not answer, from an operation of the first of these rounds on, until they are over."""
    gone = False

    def before(name: str, header: dict[str, Any]) -> None:
        nonlocal gone
        if "round" in header:
            gone = header["round"] in rounds and (gone or header.get("op", "call") == op)
        if name == site and gone:
            raise TimeoutError("no reply")

    return before


@pytest.mark.parametrize("op", ["begin", "call"])
def test_a_site_that_is_away_misses_those_rounds(op: str, tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=9"))
    federated.link.before = away("client-01", {3}, op)
    lines = federated.run().metrics()
    missed = [line["round"] for line in lines if "faults" in line]
    assert missed[0] == 3
    assert missed[-1] < 9  # it was taken back
    assert [fault["client"] for line in lines for fault in line.get("faults", [])] == ["client-01"] * len(missed)
    wanted = on_loop(federated.config, {round: {"client-01"} for round in missed})
    assert_equal(federated.tensors(), wanted, 1e-6)


def test_what_a_site_computed_too_late_is_undone(tmp_path: Path) -> None:
    """It ran the call of round 2, but its reply came after the deadline."""
    federated = Federated(tmp_path, configured("fedrep", "rounds=5"))

    def after(name: str, header: dict[str, Any]) -> None:
        if name == "client-02" and header.get("round") == 2 and "function" in header:
            raise TimeoutError("no reply")

    federated.link.after = after
    missed = {line["round"] for line in federated.run().metrics() if "faults" in line}
    assert 2 in missed
    assert_equal(federated.tensors(), on_loop(federated.config, {r: {"client-02"} for r in missed}), 1e-6)


def test_a_round_in_which_nobody_can_be_reached_is_not_the_end(tmp_path: Path) -> None:
    """As when the server's own link is down."""
    federated = Federated(tmp_path, configured("fedavg", "federation.silence=0.2"))
    failed = set[str]()

    def before(name: str, header: dict[str, Any]) -> None:
        if header.get("function") and header["round"] == 2 and name not in failed:
            failed.add(name)
            raise TimeoutError("no reply within 5 s")

    federated.link.before = before
    results = federated.run().results
    assert results is not None
    lines = federated.server.metrics()
    assert ["abandoned" in line for line in lines] == [False, True, False]
    assert "cannot be reached" in lines[1]["abandoned"]


def test_a_lost_reply_is_repeated_not_computed_again(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("ditto"))
    lost: list[Any] = []

    def after(name: str, header: dict[str, Any]) -> None:
        if name == "client-00" and header.get("round") == 2 and len(lost) < 2:
            lost.append(header)
            raise ConnectionError("cut")

    federated.link.after = after
    folder = federated.run()
    assert len(lost) == 2
    assert folder.results is not None
    assert folder.results["faults"] == 0
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_state_that_may_be_lost_costs_that_client_the_round(is_written: bool, tmp_path: Path) -> None:
    """All replies of round 2 are there, but one site does not confirm that it kept its new state."""
    federated = Federated(tmp_path, configured("fedrep", "rounds=5"))

    def lose(name: str, header: dict[str, Any]) -> None:
        if name == "client-02" and header.get("op") == "keep" and header["round"] == 2:
            raise TimeoutError("no reply")

    federated.link.after = lose if is_written else federated.link.after
    federated.link.before = federated.link.before if is_written else lose
    lines = federated.run().metrics()
    assert not any("abandoned" in line for line in lines)
    missed = {line["round"]: {f["client"] for f in line["faults"]} for line in lines if "faults" in line}
    assert missed[2] == {"client-02"}
    assert_equal(federated.tensors(), on_loop(federated.config, missed), 1e-6)


def test_a_job_that_is_torn_down_leaves_no_half_round(tmp_path: Path) -> None:
    """Every site vanishes after the calls of round 3; the next job runs it again, whole."""
    federated = Federated(tmp_path, configured("fedrep", "rounds=4", "federation.deadline=0.3"))

    def before(name: str, header: dict[str, Any]) -> None:
        if ended and ("round" not in header or header.get("op") in ("keep", "begin")):
            raise ConnectionError("the job is over")
        ended.extend([1] if header.get("round") == 3 and "function" in header else [])

    ended: list[int] = []
    federated.link.before = before
    with pytest.raises(RunError, match="round 3"):
        federated.run()
    federated.link.before = lambda name, header: None
    federated.link.restart()
    federated.run()
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)


@pytest.mark.parametrize("moment", ["between sites and server", "after a checkpoint", "within a round"])
def test_a_new_job_goes_on_from_the_checkpoint(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=5", "local.lr=0.3"))
    save = RunFolder.save_checkpoint

    def dies(self: RunFolder, status: dict[str, Any], trees: Any, touch: Any) -> None:
        if status["round"] == 3 and moment == "between sites and server":
            raise KeyboardInterrupt
        save(self, status, trees)
        if status["round"] == 3 and moment == "after a checkpoint":
            raise KeyboardInterrupt

    def before(name: str, header: dict[str, Any]) -> None:
        if header.get("round") == 3 and "function" in header and name == "client-03" and moment == "within a round":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", dies)
        federated.link.before = before
        with pytest.raises(KeyboardInterrupt):
            federated.run()
    federated.link.before = lambda name, header: None
    federated.link.restart()
    results = federated.run().results
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)
    assert [line["round"] for line in federated.server.metrics()] == [1, 2, 3, 4, 5]
    straight = runner.start(federated.config, tmp_path / "loop").results
    assert results is not None
    assert straight is not None
    assert straight["selected"]["round"] < 3  # states of a round before the interruption are still there
    assert results["selected"] == straight["selected"]


def test_a_site_that_comes_later_joins(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=5"), sites=3)

    def stop(progress: runner.Progress) -> None:
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated.run(stop)
    federated.link = Sites(federated.files)
    folder = federated.run()
    assert folder.about["clients"] == list(federated.names)
    # the line of round 2 was written, its checkpoint was not: the round is run again, with the fourth
    assert [len(line["cohort"]) for line in folder.metrics()] == [3, 4, 4, 4, 4]
    assert_equal(federated.tensors(), on_loop(federated.config, {1: {"client-03"}}), 1e-6)
    assert all((federated.private(name) / "personal" / "selected.json").exists() for name in federated.names)


def test_nobody_joins_where_the_server_has_numbers_for_each(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("duw-fedavg"), sites=3)

    def stop(progress: runner.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated.run(stop)
    federated.link = Sites(federated.files)
    assert federated.run().about["clients"] == list(federated.names[:3])


def test_a_taped_round_goes_on_without_who_is_away(tmp_path: Path) -> None:
    unrolled = ("algorithm.outer=loo", "algorithm.gradient=exact", "algorithm.cells=3", "rounds=8")
    federated = Federated(tmp_path, configured("learn2pfed", *unrolled))
    federated.link.before = away("client-01", {3})
    lines = federated.run().metrics()
    missed = {line["round"]: {"client-01"} for line in lines if "faults" in line}
    assert 3 in missed
    assert not any("abandoned" in line for line in lines)
    assert_equal(federated.tensors(), on_loop(federated.config, missed), 1e-6)


def test_a_site_lost_on_the_way_back_costs_the_round(tmp_path: Path) -> None:
    unrolled = ("algorithm.outer=loo", "algorithm.gradient=exact", "algorithm.cells=2", "rounds=5")
    federated = Federated(tmp_path, configured("learn2pfed", *unrolled))

    def before(name: str, header: dict[str, Any]) -> None:
        if name == "client-01" and header.get("round") == 2 and "function" not in header and "op" not in header:
            raise TimeoutError("no reply")

    federated.link.before = before
    lines = federated.run().metrics()
    assert [line["round"] for line in lines if "abandoned" in line] == [2]
    everybody = set(federated.names)
    missed = {line["round"]: everybody if "abandoned" in line else {"client-01"} for line in lines if "faults" in line}
    missed[2] = everybody
    assert_equal(federated.tensors(), on_loop(federated.config, missed), 1e-6)


def test_all_sites_away_ends_the_job_for_a_later_one(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedavg", "federation.deadline=0.3"))

    gone: list[int] = []

    def before(name: str, header: dict[str, Any]) -> None:
        gone.extend([1] if header.get("round") == 2 else [])
        if gone:
            raise TimeoutError("no reply")

    federated.link.before = before
    with pytest.raises(RunError, match=r"\b2\b.*client-00"):
        federated.run()
    federated.link.before = lambda name, header: None
    federated.link.restart()
    federated.run()
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)


def test_a_site_whose_data_differs_is_left_out(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedavg"))
    other = sources.load(config("data.clients=5", "data.max_samples=30").data, seed=0)
    from fedtailor.data.sources.site_data import write_prepared

    def stop(progress: runner.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated.run(stop)
    write_prepared(tmp_path / "sites" / "client-02" / "rows.safetensors", other, 1)
    federated.link.restart()
    faults = {(f["client"], f["reason"]) for line in federated.run().metrics() for f in line.get("faults", [])}
    assert len(faults) == 1
    assert "training samples; it had" in next(iter(faults))[1]


def test_the_record_tells_every_message(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=2"))
    federated.run()
    record = [json.loads(line) for line in (tmp_path / "sites/client-00/private" / AUDIT).read_text().splitlines()]
    sent = [request for name, request, reply in federated.link.seen if name == "client-00" and reply]  # no pings
    assert [line["came"]["bytes"] for line in record] == [len(request) - ENVELOPE.size for request in sent]
    asked = [line["asked"] for line in record]
    assert asked[:7] == ["hello", "start", "begin", "local", "keep", "evaluate", "begin"]
    local = record[3]
    assert local["round"] == 1
    assert set(local["left"]["keys"]) == {"0/hidden.0.weight", "0/hidden.0.bias", "1"}
    assert local["left"]["keys"]["0/hidden.0.weight"] == [8, 64]
    assert not any("out" in key for line in record for key in line["left"]["keys"])


def test_the_text_of_an_error_stays_at_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ClientContext, *args: Any, **options: Any) -> Any:
        raise ValueError("patient 4711 has no age")

    federated = Federated(tmp_path, configured("fedavg"))
    monkeypatch.setattr(ClientContext, "sgd", fails)
    with pytest.raises(Exception, match=r"FedAvg.local.*client-00.*\b1\b.*ValueError"):
        federated.run()
    assert not any(b"4711" in reply for _, _, reply in federated.link.seen)
    assert "4711" in (tmp_path / "sites/client-00/private" / AUDIT).read_text()


def test_states_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=6"))
    federated.run()
    for name in federated.names:
        kept = SiteState(federated.private(name) / "states").rounds()
        assert kept[-1] == 6
        assert len(kept) <= 4  # of the last two checkpoints: the last round and the best one


def test_metrics_stay_if_the_policy_says_so(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedavg"), metrics=False)
    folder = federated.run()
    lines = folder.metrics()
    assert lines
    assert all(isnan(value) for line in lines for value in line["val"]["accuracy"])
    assert torch.isfinite(next(iter(federated.tensors().values()))).all()
