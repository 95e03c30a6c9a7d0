"""Runs and comparisons: what a mistake would make of a figure is said instead."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedtailor as ft
from fedtailor.core.data import FederatedData
from fedtailor.data import load
from fedtailor.data.configs import DigitsConfig
from fedtailor.data.sources import saved_data
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import CompareConfig, parse
from fedtailor.experiments.store import read_json, write_json
from fedtailor.studies.compare import run_grid
from fedtailor.studies.explain import explain, overlap_by_classes
from fedtailor.studies.search import FOUND
from tests.cli.conftest import Call
from tests.made_sites import make_sites
from tests.small import DIGITS, config, one_after_the_other, stop_after


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def digits(val: float) -> FederatedData:
    return load(DigitsConfig(clients=3, max_samples=40, val=val), seed=0)


def searched(path: str) -> CompareConfig:
    tables: dict[str, Any] = DIGITS | {"rounds": 2, "data": {"source": "saved", "path": path}}
    tables |= {"compare": {"algorithms": ["fedavg"], "workers": 1}, "search": {"space": {"local.lr": [1e-6, 0.2]}}}
    made: CompareConfig = parse(tables, CompareConfig)
    return made


def test_data_of_a_program_is_searched_if_it_has_validation_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    saved_data.save(digits(0.3), Path("made"))
    (cell,) = run_grid(searched("made"), Path("grid"), None, lambda *step: None)
    tried = read_json(Path("grid") / FOUND)["found"]["FedAvg"]["tried"]
    assert [trial["settings"]["local.lr"] for trial in tried] == [1e-6, 0.2]
    assert cell.config.local.lr == max(tried, key=lambda trial: float(trial["val"]))["settings"]["local.lr"]
    saved_data.save(digits(0.0), Path("without"))
    with pytest.raises(ConfigError, match=r"validation samples.* saved"):
        run_grid(searched("without"), Path("other"), None, lambda *step: None)


def fedselect(sites: Path) -> None:
    made = {"source": "folder", "path": str(sites), "target": "outcome"}
    config = {"rounds": 2, "data": made, "model": {"hidden": [4]}, "algorithm": {"name": "fedselect"}}
    runner.start(parse(config), Path("run"))


def test_what_is_shared_is_not_told_of_other_data() -> None:
    sites = make_sites(Path("sites"), sites=2, rows=20)
    fedselect(sites)
    explain(Path("run"))
    lines = (sites / "s1.csv").read_text().splitlines()
    lines[1] = "9.5," + lines[1].split(",", 1)[1]  # one number; as many rows as before
    (sites / "s1.csv").write_text("\n".join(lines) + "\n")
    for use in (explain, overlap_by_classes):
        with pytest.raises(RunError, match=r"run: .*data .* no longer"):
            use(Path("run"))


def test_what_is_shared_is_told_of_a_folder_that_moved() -> None:
    data = replace(digits(0.1), name="mine")
    run = ft.run("fedselect", data, rounds=1, settings={"model.hidden": [4]}, out="run", progress=False)
    before = explain(run.path)
    run.path.rename("moved")
    assert explain(Path("moved")) == before


def test_a_child_of_the_users_program_survives_an_interrupted_comparison() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    child.start()

    def interrupt(cell: str, round: int, rounds: int) -> None:
        raise KeyboardInterrupt

    tables = DIGITS | {"rounds": 500, "compare": {"algorithms": ["local", "fedavg"], "workers": 2}}
    before = set(multiprocessing.active_children())
    try:
        with pytest.raises(KeyboardInterrupt):
            run_grid(parse(tables, CompareConfig), Path("grid"), None, interrupt)
        for process in set(multiprocessing.active_children()) - before:
            process.join(20)
        child.join(1)
        assert child.is_alive()
        assert set(multiprocessing.active_children()) == before  # the workers are gone
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("key", ["config_sha256", "notes", "train_samples"])
def test_a_record_of_another_version_is_one_line(key: str, call: Call) -> None:
    runner.start(config("rounds=1"), Path("run"))
    about = dict(read_json(Path("run/run.json")))
    del about[key]
    write_json(Path("run/run.json"), about)
    code, _, err = call("show", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f'error: run/run.json: has no "{key}"')


def test_results_of_another_version_are_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    tables = DIGITS | {"rounds": 1, "compare": {"algorithms": ["local"], "workers": 1}}
    Path("compare.toml").write_text(tomli_w.dumps(tables))
    run_grid(parse(tables, CompareConfig), Path("grid"), None, lambda *step: None)
    results = read_json(Path("grid/local-seed0/results.json"))
    write_json(Path("grid/local-seed0/results.json"), results | {"last": {"test": results["last"]["test"]}})
    code, _, err = call("compare", "compare.toml", "--out", "grid")
    assert code == 2
    assert err.startswith('error: grid/local-seed0/results.json: has no "clients", so another version')


def test_rounds_that_cannot_be_read_are_one_line(call: Call) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("rounds=3"), Path("run"), None, stop_after(2))
    lines = Path("run/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("run/metrics.jsonl").write_text("?" * 5 + lines[0][5:] + "".join(lines[1:]))
    code, _, err = call("show", "run")
    assert (code, err) == (2, "error: run/metrics.jsonl: line 1: damaged; it is not the JSON that was written\n")
