"""Runs: resuming changes nothing, validation selects, test data waits for the end, faults are kept count of."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedtailor import algorithms, data
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import run_state as rounds
from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import RunFolder
from tests.helpers import usual
from tests.small import ADAPTED, DIGITS, NORMED, POLYNOMIAL, config, records, stop_after

LINEAR = POLYNOMIAL | {"model": {"name": "linear", "bias": False}}
UNEVEN = DIGITS | {"data": {"source": "digits", "clients": 4, "max_samples": 300, "alpha": 0.3}}


@dataclass(frozen=True)
class Flaky(Algorithm):
    """FedAvg in which clients with few samples reply with what is not a number, in some rounds."""

    bad_from: int = 2
    bad_until: int = 2
    below: float = math.inf

    title: ClassVar[str] = "Flaky"

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        trained = me.sgd(w)
        if self.bad_from <= me.round <= self.bad_until:
            spoilt = torch.where(me.n < self.below, torch.nan, 0.0)
            trained = {k: v + spoilt for k, v in trained.items()}
        return None, (trained, me.n)

    def client_init(self, me: ClientContext) -> Tree:
        return None

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(*fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_registered", {})
    algorithms.register(Flaky)


def straight(made: RunConfig, path: Path) -> RunFolder:
    return runner.start(made, path)


def interrupted(made: RunConfig, path: Path, after: Sequence[int]) -> RunFolder:
    """A run stopped after the first of these rounds, resumed and stopped after the next, ..., and ended."""
    with pytest.raises(KeyboardInterrupt):
        runner.start(made, path, None, stop_after(after[0]))
    for number in after[1:]:
        with pytest.raises(KeyboardInterrupt):
            runner.resume(path, None, stop_after(number))
    assert RunFolder.open(path).results is None
    return runner.resume(path)


# a linear model of digits is large for a method with a curvature: tests/contract resumes it on a smaller one
CURVED = ({"model": "linear"}, {"model": "linear", "task": "count"})
RESUMED = [name for name in algorithms.algorithms() if usual(algorithms.make(name, {})) not in CURVED]


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_is_the_straight_run(tmp_path: Path, name: str) -> None:
    settings = ("federation.clients_per_round=3", "evaluation.every=2", "checkpoint.every=2", "rounds=4")
    case = usual(algorithms.make(name, {}))
    task = {"linear": LINEAR, "normed": NORMED, "adapted": ADAPTED}.get(case.get("model", "mlp"), DIGITS)
    made = config(f"algorithm.name={name}", *settings, task=task)
    assert records(interrupted(made, tmp_path / "b", (1, 3))) == records(straight(made, tmp_path / "a"))


@pytest.mark.parametrize("engine", ["loop", "vmap", "pool", "wire"])
def test_resumed_regression_is_the_straight_one_on_every_engine(tmp_path: Path, engine: str) -> None:
    made = config("algorithm.name=ditto", f"federation.engine={engine}", task=POLYNOMIAL)
    assert records(interrupted(made, tmp_path / "b", (3,))) == records(straight(made, tmp_path / "a"))


@pytest.mark.parametrize("where", ["training", "evaluation"])
@pytest.mark.parametrize("every", [1, 10])
def test_interrupt_inside_a_round_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, every: int
) -> None:
    made = config("algorithm.name=ditto", "federation.engine=loop", f"checkpoint.every={every}")
    calls = 0

    def once(original: Any, number: int) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        if where == "training":  # Ditto trains twice per client; four clients a round
            patch.setattr(ClientContext, "sgd", once(ClientContext.sgd, 2 * 8 + 5))
        else:
            patch.setattr(rounds, "measure", once(rounds.measure, 3))
        with pytest.raises(KeyboardInterrupt):
            runner.start(made, tmp_path / "b")
    assert len(RunFolder(tmp_path / "b").metrics()) == 2
    assert records(runner.resume(tmp_path / "b")) == records(straight(made, tmp_path / "a"))


def test_what_does_not_fit_together_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Algorithm, me: ClientContext) -> Tree:
        raise ConfigError("this algorithm needs another model")

    monkeypatch.setattr(algorithms.algorithms()["ditto"], "client_init", refuse)
    with pytest.raises(ConfigError, match="needs another model"):
        runner.start(config("algorithm.name=ditto"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_killed_in_the_final_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config("algorithm.name=fedper")

    def die(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "write_json", die)
        with pytest.raises(KeyboardInterrupt):
            runner.start(made, tmp_path / "b")
    assert records(runner.resume(tmp_path / "b")) == records(straight(made, tmp_path / "a"))


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    folder = straight(config(), tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert records(runner.resume(tmp_path / "a", None, stop_after(1))) == records(folder)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_resumed_run_uses_the_threads_it_began_with(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.start(config(), tmp_path / "b", None, stop_after(1))
    assert RunFolder(tmp_path / "b").about["threads"] == 1
    torch.set_num_threads(2)
    used: set[int] = set()
    try:
        runner.resume(tmp_path / "b", None, lambda progress: used.add(torch.get_num_threads()))
        assert used == {1}
        assert torch.get_num_threads() == 2  # as it was
    finally:
        torch.set_num_threads(1)


def test_data_that_changed_is_noticed(tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    sites.mkdir()
    text = "x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20))
    for name in ("ada", "bo"):
        (sites / f"{name}.csv").write_text(text)
    task = {"rounds": 3, "data": {"source": "folder", "path": str(sites), "target": "y"}, "model": {"name": "linear"}}
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("algorithm.name=local", task=task), tmp_path / "run", None, stop_after(1))
    (sites / "bo.csv").write_text(text + "20,1\n" * 10)
    with pytest.raises(RunError, match=r"data .* no longer"):
        runner.resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [("checkpoint.every=2", [2, 4, 5]), ("checkpoint.every=9", [5]), ("checkpoint.seconds=1e9", [1, 5])],
)
def test_checkpoints_are_as_frequent_as_asked_and_the_last_round_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, wanted: list[int]
) -> None:
    saved: list[int] = []
    original = RunFolder.save_checkpoint

    def save(self: RunFolder, status: dict[str, Any], trees: Any, touch: Any) -> None:
        saved.append(status["round"])
        original(self, status, trees)

    monkeypatch.setattr(RunFolder, "save_checkpoint", save)
    straight(config("algorithm.name=local", "rounds=5", setting), tmp_path / "a")
    assert saved == wanted


def test_cohorts_are_drawn_anew_from_the_seed(tmp_path: Path) -> None:
    def cohorts(seed: int) -> list[list[int]]:
        made = config("algorithm.name=local", "federation.clients_per_round=2", f"seed={seed}", "rounds=8")
        return [line["cohort"] for line in straight(made, tmp_path / f"{seed}").metrics()]

    drawn = cohorts(0)
    assert all(len(set(c)) == 2 and c == sorted(c) and set(c) <= set(range(4)) for c in drawn)
    assert len({tuple(c) for c in drawn}) > 1
    assert {client for c in drawn for client in c} == {0, 1, 2, 3}
    assert cohorts(1) != drawn


def by_hand(folder: RunFolder, kind: str) -> dict[str, list[float]]:
    """Test figures of the saved personal models, in plain torch."""
    loaded = data.load(folder.config.data, seed=folder.config.seed)
    out: dict[str, list[float]] = {"accuracy": [], "loss": []}
    for i, client in enumerate(loaded.clients):
        w = folder.personal(client, kind)
        x, y = loaded.test.of(i)
        hidden = torch.relu(x.flatten(1) @ w["hidden.0.weight"].T + w["hidden.0.bias"])
        output = hidden @ w["out.weight"].T + w["out.bias"]
        out["accuracy"].append((output.argmax(1) == y).double().mean().item())
        out["loss"].append(torch.nn.functional.cross_entropy(output, y).item())
    return out


@pytest.mark.parametrize("every", [1, 3])
def test_validation_selects_the_round(tmp_path: Path, every: int) -> None:
    settings = ("algorithm.name=fedper", "local.lr=0.7", f"evaluation.every={every}")
    folder = straight(config(*settings, "rounds=10"), tmp_path / "a")
    lines, results = folder.metrics(), folder.results
    assert results is not None
    assert [line["round"] for line in lines] == list(range(1, 11))
    assert [line["round"] for line in lines if "val" in line] == [*range(every, 10, every), 10]
    curve = {line["round"]: statistics.fmean(line["val"]["accuracy"]) for line in lines if "val" in line}
    assert results["selected"]["round"] == max(curve, key=lambda r: (curve[r], -r))
    assert results["selected"]["round"] < 10  # otherwise this test shows nothing
    assert results["last"]["round"] == 10
    for kind in ("last", "selected"):
        found = by_hand(folder, kind)
        assert results[kind]["clients"]["accuracy"] == pytest.approx(found["accuracy"], abs=1e-12)
        assert results[kind]["clients"]["loss"] == pytest.approx(found["loss"], rel=1e-5)
        summary = results[kind]["test"]["accuracy"]
        assert summary["mean"] == pytest.approx(statistics.fmean(found["accuracy"]))
        assert summary["std"] == pytest.approx(statistics.pstdev(found["accuracy"]))
        assert summary["worst_tenth"] == pytest.approx(min(found["accuracy"]))
        assert results[kind]["test"]["loss"]["worst_tenth"] == pytest.approx(max(found["loss"]), rel=1e-5)
        assert summary["clients"] == 4
    assert results["last"]["clients"] != results["selected"]["clients"]
    shorter = straight(config(*settings, f"rounds={results['selected']['round']}"), tmp_path / "b")
    for client in folder.about["clients"]:  # private heads included, the models are those of the selected round
        torch.testing.assert_close(folder.personal(client), shorter.personal(client, "last"), rtol=0, atol=0)
    assert results["metric"] == "accuracy"
    assert results["higher_is_better"] is True


@pytest.mark.parametrize("made", [config("data.val=0"), config("algorithm.name=ditto", task=POLYNOMIAL)])
def test_without_validation_data_the_last_round_is_selected(tmp_path: Path, made: RunConfig) -> None:
    folder = straight(made, tmp_path / "a")
    assert folder.results is not None
    assert folder.results["selected"] == folder.results["last"]
    assert folder.results["selected"]["round"] == made.rounds
    assert math.isnan(folder.metrics()[-1]["val"][folder.results["metric"]][0])
    client = folder.about["clients"][2]
    torch.testing.assert_close(folder.personal(client), folder.personal(client, "last"), rtol=0, atol=0)


def test_smaller_is_better_for_regression(tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    sites.mkdir()
    for name, slope in (("ada", 1), ("bo", -1)):
        text = "x,y\n" + "".join(f"{i / 20},{slope * i / 20 + (i * 7 % 5) / 10}\n" for i in range(40))
        (sites / f"{name}.csv").write_text(text)
    task = {"data": {"source": "folder", "path": str(sites), "target": "y", "task": "regression"}, "rounds": 8}
    made = config("algorithm.name=fedavg", "local.lr=0.3", "model.name=linear", task=task)
    folder = straight(made, tmp_path / "run")
    assert folder.results is not None
    curve = {line["round"]: statistics.fmean(line["val"]["rmse"]) for line in folder.metrics()}
    assert folder.results["metric"] == "rmse"
    assert folder.results["selected"]["round"] == min(curve, key=lambda r: (curve[r], r))
    assert len(set(curve.values())) > 1


def test_test_data_waits_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    original = InProcess.evaluate

    def evaluate(self: InProcess, clients: Any, round: int, server: Tree, splits: Sequence[str], keep: str) -> Any:
        asked.append(list(splits))
        return original(self, clients, round, server, splits)

    monkeypatch.setattr(InProcess, "evaluate", evaluate)
    plain = straight(config("rounds=3"), tmp_path / "a")
    assert asked == [["val"]] * 3 + [["test"]] * 2
    assert not any("test" in line for line in plain.metrics())
    asked.clear()
    curve = straight(config("rounds=3", "evaluation.test_curve=true"), tmp_path / "b")
    assert asked == [["val", "test"]] * 3 + [["test"]] * 2
    assert curve.fingerprint() == plain.fingerprint()  # looking changes nothing
    assert curve.results is not None
    assert curve.metrics()[-1]["test"] == curve.results["last"]["clients"]


def test_traffic_adds_up(tmp_path: Path) -> None:
    folder = straight(config("algorithm.name=fedper", "rounds=3", "federation.clients_per_round=2"), tmp_path / "a")
    assert folder.results is not None
    lines = folder.metrics()
    assert folder.results["traffic"] == {k: lines[-1][k] for k in ("up", "down", "trips")}
    assert [line["trips"] for line in lines] == [1, 2, 3]
    body = (64 * 8 + 8) * 4  # bytes of the one hidden layer
    assert 2 * body < lines[0]["up"] < 2 * body + 1000
    assert folder.results["gathered"] == []


@pytest.mark.usefixtures("flaky")
def test_abandoned_round_changes_nothing_and_is_recorded(tmp_path: Path) -> None:
    made = config("algorithm.name=flaky", "rounds=4")
    folder = straight(made, tmp_path / "a")
    lines = folder.metrics()
    assert folder.results is not None
    assert ["abandoned" in line for line in lines] == [False, True, False, False]
    assert re.search(r"\b2\b.*\b0\b.*\b4\b.*\b1\b", lines[1]["abandoned"])
    assert lines[1]["val"] == lines[0]["val"]
    assert lines[2]["val"] != lines[1]["val"]
    assert [f["client"] for f in lines[1]["faults"]] == folder.about["clients"]
    assert (folder.results["faults"], folder.results["abandoned"]) == (4, 1)
    assert records(interrupted(made, tmp_path / "b", (2,))) == records(folder)


@pytest.mark.usefixtures("flaky")
def test_one_bad_client_is_recorded_and_left_out(tmp_path: Path) -> None:
    sizes = build_experiment(config(task=UNEVEN)).data.train.sizes.tolist()
    smallest = sizes.index(min(sizes))
    assert sizes.count(min(sizes)) == 1
    settings = ("algorithm.name=flaky", "algorithm.bad_until=3", f"algorithm.below={min(sizes) + 0.5}", "rounds=4")
    told: list[runner.Progress] = []
    folder = runner.start(config(*settings, task=UNEVEN), tmp_path / "a", None, told.append)
    assert [(p.clients, p.faults) for p in told] == [(4, 0), (3, 1), (3, 2), (4, 2)]
    faults = [fault for line in folder.metrics() for fault in line.get("faults", [])]
    assert [(f["client"], f["round"], f["function"]) for f in faults] == [
        (folder.about["clients"][smallest], 2, "local"),
        (folder.about["clients"][smallest], 3, "local"),
    ]
    assert all("is not finite" in f["reason"] for f in faults)
    assert folder.results is not None
    assert (folder.results["faults"], folder.results["abandoned"]) == (2, 0)
    strict = straight(config(*settings, "federation.min_replies=4", task=UNEVEN), tmp_path / "b")
    assert strict.results is not None
    assert strict.results["abandoned"] == 2


@pytest.mark.usefixtures("flaky")
def test_ten_abandoned_rounds_in_a_row_stop_the_run(tmp_path: Path) -> None:
    made = config("algorithm.name=flaky", "algorithm.bad_until=99", "rounds=20")
    with pytest.raises(RunError, match=r"\b10\b.*\b11\b.*\b0\b.*\b4\b"):
        runner.start(made, tmp_path / "a")
    assert len(RunFolder(tmp_path / "a").metrics()) == 11
    with pytest.raises(KeyboardInterrupt):
        runner.start(made, tmp_path / "b", None, stop_after(6))
    with pytest.raises(RunError, match=r"\b10\b.*\b11\b"):
        runner.resume(tmp_path / "b")


def test_run_folder_says_what_made_it(tmp_path: Path) -> None:
    folder = straight(config("rounds=1"), tmp_path / "a")
    about = folder.about
    assert about["engine"] == "vmap"
    assert about["clients"] == ["client-00", "client-01", "client-02", "client-03"]
    assert about["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    assert about["versions"]["torch"] == torch.__version__
    assert about["task_id"] == folder.config.task_id
    assert folder.config.federation.engine == "auto"


def test_workers_tell_of_their_solves(tmp_path: Path) -> None:
    task = DIGITS | {"rounds": 2, "model": {"name": "deq-mlp"}, "algorithm": {"name": "fedeq"}}
    alone, pool = (
        [line["report"] for line in runner.start(config(f"federation.engine={e}", task=task), tmp_path / e).metrics()]
        for e in ("loop", "pool")
    )
    assert alone[-1]["solver_iterations"] > 1
    assert pool == alone
