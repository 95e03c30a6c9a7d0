"""A fit: halving, what is chosen and from what, going on after an interruption, and nothing written half."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor import data
from fedtailor.core.data import FederatedData, Rows
from fedtailor.errors import ConfigError, DataError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import FIT, RunFolder, read_json
from fedtailor.tables import halving as fitting
from fedtailor.tables.fit import fit
from fedtailor.tables.halving import best_validation, plan
from tests.made_sites import make_sites
from tests.small import config, records

SMALL = {"model.name": "mlp", "model.hidden": [8], "checkpoint.seconds": 0}


@pytest.fixture(scope="module", autouse=True)
def four_candidates() -> Iterator[None]:
    """Enough to halve twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "NETWORK", fitting.NETWORK[:2] + fitting.NETWORK[3:5])
        yield


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sites(tmp_path_factory.mktemp("made") / "sites")


@pytest.fixture(scope="module")
def done(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished fit of eight rounds."""
    out = tmp_path_factory.mktemp("fit") / "out"
    fit(source(sites), out, rounds=8, values=SMALL)
    return out


def source(sites: Path) -> dict[str, Any]:
    return {"source": "folder", "path": str(sites), "target": "outcome"}


def test_half_of_the_candidates_is_dropped_at_each_budget(done: Path) -> None:
    record = read_json(done / FIT)
    assert [d["round"] for d in record["dropped"]] == [2, 2, 4]
    rounds = {p.parent.name: len(RunFolder(p.parent).metrics()) for p in done.glob("*/run.json")}
    assert sorted(rounds.values()) == [2, 2, 4, 8, 8, 8]
    assert rounds["local-seed0"] == rounds["fedavg-seed0"] == 8
    ended = {p.parent.name for p in done.glob("*/results.json")}
    assert ended == {name for name, count in rounds.items() if count == 8}


def test_who_is_dropped_was_worse(done: Path, sites: Path) -> None:
    made = plan(source(sites), done, rounds=8, values=SMALL)
    dropped = {d["label"] for d in read_json(done / FIT)["dropped"] if d["round"] == 2}
    standings = {cell.label: best_validation(cell, 2) for cell in made.candidates}
    assert min(s for label, s in standings.items() if label not in dropped) >= max(standings[d] for d in dropped)


def test_the_record_has_every_site_and_the_runs_figures(done: Path) -> None:
    record = read_json(done / FIT)
    assert list(record["sites"]) == ["s0", "s1", "s2", "s3"]
    for i, row in enumerate(record["sites"].values()):
        results = RunFolder(done / row["run"]).results
        assert results is not None
        assert row["personal"] == results["last"]["clients"]["accuracy"][i]
        assert row["train"] + row["val"] + row["test"] == 60
    assert record["sites"]["s3"]["served"] != "FedAvg"  # there everything works the other way round
    assert record["sites"]["s3"]["common"] < 0.5 < record["sites"]["s3"]["personal"]
    assert record["newcomers"] != "local-seed0"
    assert record["shared"]["FedAvg"] == {"sent": "model, sample count", "private": "nothing"}
    assert record["hurt"] == sum(r["personal"] < r["alone"] for r in record["sites"].values()) / 4


def test_going_on_gives_what_an_undisturbed_fit_gives(done: Path, sites: Path, tmp_path: Path) -> None:
    told: list[str] = []

    def interrupt(cell: str, round: int, rounds: int) -> None:
        told.append(cell)
        if len(told) == 21:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(source(sites), tmp_path / "out", rounds=8, values=SMALL, listener=interrupt)
    assert "sites" not in read_json(tmp_path / "out" / FIT)
    record = fit(source(sites), tmp_path / "out", rounds=8, values=SMALL)
    assert record == read_json(done / FIT)
    ran: list[str] = []
    assert fit(source(sites), tmp_path / "out", rounds=8, values=SMALL, listener=lambda *a: ran.append(a[0])) == record
    assert ran == []


def test_choices_do_not_depend_on_test_data(done: Path, sites: Path, tmp_path: Path) -> None:
    loaded = data.load(parse({"data": source(sites) | {"val": 0.2, "max_samples": 100_000}}).data, seed=0)
    swapped = replace(loaded, test=Rows(-loaded.test.x, 1 - loaded.test.y, loaded.test.starts))
    record, other = read_json(done / FIT), fit(source(sites), tmp_path / "out", rounds=8, values=SMALL, loaded=swapped)
    for key in ("served", "gains", "run"):
        assert [r[key] for r in other["sites"].values()] == [r[key] for r in record["sites"].values()]
    assert other["dropped"] == record["dropped"]
    assert other["newcomers"] == record["newcomers"]
    assert [r["personal"] for r in other["sites"].values()] != [r["personal"] for r in record["sites"].values()]


def test_one_algorithm_serves_all(sites: Path, tmp_path: Path) -> None:
    values = SMALL | {"algorithm.lam": 0.5}
    record = fit(source(sites), tmp_path / "out", algorithm="ditto", rounds=2, values=values)
    assert {row["served"] for row in record["sites"].values()} == {"Ditto"}
    assert RunFolder(tmp_path / "out/ditto-seed0").config.algorithm.options == {"lam": 0.5}
    assert record["dropped"] == []
    record = fit(source(sites), tmp_path / "common", algorithm="fedavg", rounds=2, values=SMALL)
    assert {row["served"] for row in record["sites"].values()} == {"FedAvg"}


def test_numbers_are_told_in_units_of_the_target(tmp_path: Path) -> None:
    sites = make_sites(tmp_path / "sites", sites=3, rows=30, numbers=True)
    values = {"model.name": "linear"}
    record = fit(source(sites), tmp_path / "out", rounds=4, values=values)
    assert (record["metric"], record["task"]) == ("rmse", "regression")
    folder = RunFolder(tmp_path / "out/local-seed0")
    assert folder.results is not None
    assert folder.preparation is not None
    assert folder.preparation.target.sd > 10
    alone = [row["alone"] / folder.preparation.target.sd for row in record["sites"].values()]
    assert alone == pytest.approx(folder.results["last"]["clients"]["rmse"])
    assert {p.parent.name for p in (tmp_path / "out").glob("*/run.json")} == {
        *("local-seed0", "fedavg-seed0", "fedavg+ft-seed0", "ditto-seed0", "learn2pfed-seed0", "empiricalbayes-seed0")
    }


def test_a_single_site_is_alone(tmp_path: Path) -> None:
    sites = make_sites(tmp_path / "sites", sites=1)
    record = fit(source(sites), tmp_path / "out", rounds=2, values=SMALL)
    assert record["sites"]["s0"]["served"] == "Local"
    assert [p.parent.name for p in (tmp_path / "out").glob("*/run.json")] == ["local-seed0"]


def test_a_candidate_that_fails_is_dropped(sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "NETWORK", ({"name": "fedper"}, {"name": "ditto", "lam": 1e9}))
    record = fit(source(sites), tmp_path / "out", rounds=4, values=SMALL | {"local.clip": 0.0})
    why = {d["label"]: d["why"] for d in record["dropped"]}
    assert "Ditto" in why
    assert {row["served"] for row in record["sites"].values()} <= {"Local", "FedAvg", "FedPer"}


def test_settings_follow_the_data() -> None:
    def federation(rows: int, shape: tuple[int, ...]) -> FederatedData:
        made = Rows(torch.zeros((rows, *shape)), torch.zeros(rows, dtype=torch.int64), torch.tensor([0, rows]))
        return FederatedData("made", "classification", ("one",), made, made, made, 2)

    def model(rows: int, *shape: int, **given: Any) -> dict[str, Any]:
        return fitting.fill_defaults({"rounds": 32, **given}, federation(rows, shape))

    assert model(100, 10)["model"] == {"name": "linear"}
    assert model(1000, 10)["model"] == {"name": "mlp", "hidden": [32]}
    tiny = Rows(torch.zeros((8 * 159, 4)), torch.zeros(8 * 159, dtype=torch.int64), torch.arange(0, 8 * 160, 8))
    many = FederatedData("made", "classification", tuple(map(str, range(159))), tiny, tiny, tiny, 2)
    assert fitting.fill_defaults({"rounds": 32}, many)["model"] == {"name": "linear"}  # rows of all sites would suffice
    assert model(100, 1, 28, 28)["model"] == {"name": "fmnist-cnn"}
    assert model(100, 3, 32, 32)["model"] == {"name": "lenet5"}
    assert model(1000, 10, model={"hidden": [5]})["model"] == {"name": "mlp", "hidden": [5]}
    assert model(1000, 10, model={"name": "linear"})["model"] == {"name": "linear"}
    assert model(20_000, 2, local={"lr": 0.5})["local"] == {"lr": 0.5, "batch_size": 256, "clip": 10.0}
    assert model(100, 10)["evaluation"] == {"every": 4}


def test_refused_before_anything_is_written(sites: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r'"outcom".*"outcome"'):
        fit(source(sites) | {"target": "outcom"}, out)
    with pytest.raises(ConfigError, match="name it with --algorithm"):
        fit(source(sites), out, values={"algorithm.lam": 1})
    with pytest.raises(ConfigError, match=r'"dito".*"ditto"'):
        fit(source(sites), out, algorithm="dito")
    with pytest.raises(ConfigError, match=r"raise data\.val"):
        fit(source(sites), out, values=SMALL | {"data.val": 0.0})
    with pytest.raises(ConfigError, match="linear"):
        fit(source(sites), out, algorithm="learn2pfed")
    assert not out.exists()


def test_a_folder_belongs_to_one_fit(done: Path, sites: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds another fit"):
        fit(source(sites), done, rounds=4, values=SMALL)
    runner.start(config("rounds=1"), tmp_path / "runs/one")
    with pytest.raises(RunError, match="holds other runs"):
        fit(source(sites), tmp_path / "runs", rounds=4, values=SMALL)


def test_a_run_stopped_at_a_round_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    wanted = runner.start(config("rounds=5", "algorithm.name=ditto"), tmp_path / "whole")
    parts = runner.start(config("rounds=5", "algorithm.name=ditto"), tmp_path / "parts", until=2)
    assert parts.results is None
    assert len(parts.metrics()) == 2
    runner.resume(tmp_path / "parts", until=3)
    assert len(parts.metrics()) == 3
    runner.resume(tmp_path / "parts", until=3)
    runner.resume(tmp_path / "parts")
    assert records(parts) == records(wanted)


def test_other_data_is_not_taken_for_that_of_the_fit(done: Path, sites: Path, tmp_path: Path) -> None:
    copied, out = tmp_path / "sites", tmp_path / "out"
    shutil.copytree(sites, copied)
    fit(source(copied), out, rounds=1, algorithm="ditto", values=SMALL)
    table = (copied / "s0.csv").read_bytes()
    (copied / "s0.csv").write_bytes(table.replace(b"well", b"?").replace(b"ill", b"well").replace(b"?", b"ill"))
    with pytest.raises(RunError, match=r"out: .*data .* no longer"):
        fit(source(copied), out, rounds=1, algorithm="ditto", values=SMALL)
    with pytest.raises(RunError, match=r"ditto-seed0: .*data"):
        runner.reload_experiment(RunFolder.open(out / "ditto-seed0"))
    (copied / "s0.csv").write_bytes(table)
    (copied / "read.me").write_text("not a table")
    fit(source(copied), out, rounds=1, algorithm="ditto", values=SMALL)


@pytest.mark.parametrize("algorithm", ["fedrep", "fedeq", "fedbabu", "lg-fedavg"])
def test_what_shares_a_body_gets_a_model_that_has_one(algorithm: str, tmp_path: Path) -> None:
    few = make_sites(tmp_path / "few", sites=2, rows=20)
    record = fit(source(few), tmp_path / "out", algorithm=algorithm, rounds=1)
    assert record["model"] == "mlp"
    assert fit(source(few), tmp_path / "auto", algorithm="ditto", rounds=1)["model"] == "linear"
