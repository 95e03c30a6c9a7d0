"""Callbacks and early stopping: who is told what, when a run ends, and with which model."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.errors import ConfigError
from fedtailor.experiments import runner, tracking
from fedtailor.experiments.callbacks import Callback, Followed, OptunaPruning
from fedtailor.experiments.store import read_json
from fedtailor.metrics.summary import summarise
from tests.small import DIGITS, config, records, stop_after


class Log(Callback):
    """Writes down what it is told, and ends the run after a round."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.heard: list[Any] = []

    def round_begins(self, run: Followed, round: int) -> None:
        self.heard.append(("begins", round))

    def round_ends(self, run: Followed, line: Any, value: float) -> bool:
        assert value == pytest.approx(summarise(line["val"][run.metric], higher_is_better=run.higher_is_better).mean)
        self.heard.append(("ends", line["round"]))
        return bool(line["round"] == self.last)

    def run_ends(self, run: Followed, results: Any) -> None:
        self.heard.append(("over", results["last"]["round"]))


def test_callbacks_are_told_and_may_end_a_run(tmp_path: Path) -> None:
    log, only_end = Log(last=3), SimpleNamespace(run_ends=lambda run, results: log.heard.append(run.path.name))
    made = ft.run("fedavg", DIGITS, out=tmp_path / "run", progress=False, callbacks=[log, only_end])
    rounds = [(word, round) for round in (1, 2, 3) for word in ("begins", "ends")]
    assert log.heard == [*rounds, ("over", 3), "run"]
    assert made.results["last"]["round"] == len(made.metrics()) == 3
    with pytest.raises(ConfigError, match="callbacks: int"):
        ft.run("fedavg", DIGITS, out=tmp_path / "other", progress=False, callbacks=[3])


def test_a_pruned_trial_stops_its_run_which_can_go_on(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    reported: list[int] = []

    class Trial:
        def report(self, value: float, step: int) -> None:
            reported.append(step)

        def should_prune(self) -> bool:
            return len(reported) == 2

    with pytest.raises(optuna.TrialPruned, match="in round 2"):
        ft.run("fedavg", DIGITS, out=tmp_path / "run", progress=False, callbacks=[OptunaPruning(Trial())])
    assert reported == [1, 2]
    assert runner.resume(tmp_path / "run").results is not None


STOPPING = ("rounds=30", "local.lr=0.3", "early_stopping.patience=3", "early_stopping.min_delta=0.02")


def plain_end(values: list[float], patience: int, delta: float, sign: int) -> tuple[int, int]:
    """Written as a loop: the round that counts as best, and the last one."""
    best, at = -math.inf, 0
    for round, value in enumerate(values, start=1):
        if sign * value > best + delta:
            best, at = sign * value, round
        if round - at >= patience:
            return at, round
    return at, len(values)


@pytest.mark.parametrize(("metric", "keep"), [("accuracy", "best"), ("loss", "best"), ("accuracy", "last")])
def test_early_stopping(metric: str, keep: str, tmp_path: Path) -> None:
    own = (f'early_stopping.metric="{metric}"', f'early_stopping.keep="{keep}"')
    folder = runner.start(config(*STOPPING, *own), tmp_path / "run")
    whole = runner.start(config("rounds=30", "local.lr=0.3"), tmp_path / "whole")
    values = [sum(line["val"][metric]) / len(line["val"][metric]) for line in whole.metrics()]
    best, last = plain_end(values, 3, 0.02, 1 if metric == "accuracy" else -1)
    assert last < 30
    assert len(folder.metrics()) == last
    results: Any = folder.results
    assert results["stopped"] == last
    assert results["last"]["round"] == (best if keep == "best" else last)
    as_then = runner.start(config("local.lr=0.3", f"rounds={results['last']['round']}"), tmp_path / "then").results
    assert as_then is not None
    assert results["last"]["clients"] == as_then["last"]["clients"]


def test_an_interrupted_run_stops_where_it_would_have(tmp_path: Path) -> None:
    straight = runner.start(config(*STOPPING), tmp_path / "straight")
    rounds = len(straight.metrics())
    with pytest.raises(KeyboardInterrupt):
        runner.start(config(*STOPPING), tmp_path / "run", None, stop_after(rounds - 1))
    assert records(runner.resume(tmp_path / "run")) == records(straight)


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'early_stopping\.metric.*"acuracy".*"accuracy"'):
        runner.start(config(*STOPPING, 'early_stopping.metric="acuracy"'), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"early_stopping: .*validation"):
        runner.start(config(*STOPPING, "data.val=0"), tmp_path / "other")


class FakeWandb:
    """As much of the package as is used; keeps what it is told."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.Settings = dict

    def init(self, **options: Any) -> Any:
        run: dict[str, Any] = options | {"told": []}
        self.runs.append(run)
        return SimpleNamespace(
            define_metric=lambda *names, **more: None,
            log=lambda values: run["told"].append(values),
            finish=lambda exit_code: run.update(exit=exit_code),
        )


def test_wandb_has_every_round_once_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(tracking, "find_spec", lambda name: object())
    made = config('tracking.wandb="digits"', "checkpoint.every=2")
    with pytest.raises(KeyboardInterrupt):
        runner.start(made, tmp_path / "run", None, stop_after(3))
    folder = runner.resume(tmp_path / "run")
    first, second = fake.runs
    assert (first["exit"], second["exit"]) == (1, 0)
    assert first["id"] == second["id"] == read_json(folder.path / tracking.WANDB)["id"]
    assert (first["project"], first["mode"], first["config"]["local.lr"]) == ("digits", "offline", 0.1)
    told = [(v["round"], v["val/accuracy"]) for run in fake.runs for v in run["told"] if "val/accuracy" in v]
    assert told == [(line["round"], sum(line["val"]["accuracy"]) / 4) for line in folder.metrics()]
    assert any("last/test accuracy" in values for values in second["told"])


def test_wandb_that_is_not_there_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking\.wandb"):
        runner.start(config('tracking.wandb="digits"'), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["loop", "vmap", "pool"])
def test_kept_optimizers_and_server_steps_go_on_after_an_interruption(engine: str, tmp_path: Path) -> None:
    own = ('local.optimizer="adam"', "local.lr=0.01", "local.keep_state=true", "local.accumulate=2")
    made = config(*own, 'server.optimizer="yogi"', "server.lr=0.05", f"federation.engine={engine}", "rounds=4")
    straight = runner.start(made, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        runner.start(made, tmp_path / "run", None, stop_after(2))
    assert records(runner.resume(tmp_path / "run")) == records(straight)
