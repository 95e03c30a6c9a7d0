"""`import fedtailor as ft`: quick to import, frames of any kind in, models and pages out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
import torch

import fedtailor as ft
from fedtailor import algorithms
from fedtailor.api import Fit, Run
from fedtailor.core.algorithm import Algorithm
from fedtailor.data import load
from fedtailor.data.configs import DigitsConfig
from fedtailor.data.tabular.read import as_frame
from fedtailor.errors import ConfigError, DataError, RunError
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.store import RunFolder
from fedtailor.serving import onboard
from tests.made_sites import make_sites

SMALL = {"model.name": "linear"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(algorithms, "_registered", dict(algorithms._registered))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def frames(tmp_path: Path) -> dict[str, pl.DataFrame]:
    folder = make_sites(tmp_path / "sites", sites=3, rows=30)
    return {path.stem: pl.read_csv(path) for path in sorted(folder.iterdir())}


def test_importing_is_quick() -> None:
    code = "import sys, fedtailor; assert not {'torch', 'polars', 'numpy', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"fit", "run", "load"} <= set(dir(ft))
    assert ft.FedRep is algorithms.algorithms()["fedrep"]
    with pytest.raises(AttributeError, match="no attribute 'FedRap'"):
        _ = ft.FedRap


def test_frames_by_name(frames: dict[str, pl.DataFrame], capsys: pytest.CaptureFixture[str]) -> None:
    run = ft.fit(frames, target="outcome", algorithm="ditto", rounds=2, settings=SMALL)
    assert capsys.readouterr().out.splitlines()[0] == "local-seed0  2/2 rounds"
    assert run.sites == ["s0", "s1", "s2"]
    assert run.path == Path("runs/frames-fit")
    assert run.table["served"].to_list() == ["Ditto"] * 3
    own = run.personal("s1")
    assert set(own.predict(frames["s1"])) <= {"ill", "well"}
    page = run.report()
    assert page == Path("runs/frames-fit/report.html")
    assert "Personal models for data" in page.read_text(encoding="utf-8")
    assert repr(run).startswith("Fit(3 sites of data; test accuracy: alone ")
    html = run._repr_html_()
    assert html.count("<tr>") == 4
    assert "<td>s2</td>" in html
    again = ft.load(run.path)
    assert isinstance(again, Fit)
    assert again.record == run.record
    frames["s0"].write_csv("late.csv")
    assert run.onboard("late", "late.csv").site == "late"
    assert run.onboard("later", pl.read_csv("late.csv")).site == "later"


def test_one_frame_and_a_folder_give_the_same(frames: dict[str, pl.DataFrame]) -> None:
    options: dict[str, Any] = {"algorithm": "fedavg", "rounds": 2, "settings": SMALL, "progress": False}
    whole = pl.concat([frame.with_columns(pl.lit(name).alias("where")) for name, frame in frames.items()])
    runs = [
        ft.fit("sites", "outcome", out="a", **options),
        ft.fit(frames, "outcome", out="b", **options),
        ft.fit(whole, "outcome", client_column="where", out="c", **options),
    ]
    tables = [run.table for run in runs]
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


def test_frames_that_are_refused_leave_nothing(frames: dict[str, pl.DataFrame]) -> None:
    with pytest.raises(DataError, match="one frame needs client_column"):
        ft.fit(frames["s0"], "outcome")
    with pytest.raises(DataError, match=r's1\.parquet.*"outcome"'):
        ft.fit(frames | {"s1": frames["s1"].drop("outcome")}, "outcome")
    with pytest.raises(DataError, match='site "a/b": '):
        ft.fit({"a/b": frames["s0"]}, "outcome")
    with pytest.raises(DataError, match='site "x": is a list'):
        ft.fit({"x": [1]}, "outcome")
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_frames_of_a_fit_are_not_overwritten(frames: dict[str, pl.DataFrame]) -> None:
    run = ft.fit(frames, "outcome", algorithm="ditto", rounds=1, settings=SMALL, progress=False)
    other = frames | {"s0": frames["s0"].head(15)}
    for given in (other, {name: frames[name] for name in ("s0", "s1")}):
        with pytest.raises(DataError, match=r"other frames .* out"):
            ft.fit(given, "outcome", algorithm="ditto", rounds=1, settings=SMALL, out=run.path, progress=False)
    assert all(pl.read_parquet(run.path / f"data/{name}.parquet").equals(frame) for name, frame in frames.items())
    same = ft.fit(frames, "outcome", algorithm="ditto", rounds=1, settings=SMALL, out=run.path, progress=False)
    assert same.record == run.record


def test_a_folder_may_move(frames: dict[str, pl.DataFrame], tmp_path: Path) -> None:
    run = ft.fit(frames, "outcome", algorithm="ditto", rounds=1, settings=SMALL, progress=False)
    run.path.rename(tmp_path / "moved")
    newcomer = tmp_path / "late.csv"
    frames["s0"].write_csv(newcomer)
    found = onboard.onboard(tmp_path / "moved", newcomer, "late")
    assert found.samples["train"] > 0
    made = ft.run("local", load(DigitsConfig(clients=3, max_samples=30), seed=0), rounds=1, progress=False)
    made.path.rename(tmp_path / "elsewhere")
    assert reload_experiment(RunFolder.open(tmp_path / "elsewhere")).data.clients == (
        "client-00",
        "client-01",
        "client-02",
    )


def test_pandas_without_importing_it(frames: dict[str, pl.DataFrame]) -> None:
    pandas = pytest.importorskip("pandas")
    made = pandas.DataFrame(
        {
            "a": [1.5, None, 3.0],
            "b": [1, 2, 3],
            "ward": ["north", None, "south"],
            "mixed": [1, "two", None],
            "when": pandas.to_datetime(["2024-01-01", None, "2024-01-03"]),
            "kind": pandas.Categorical(["x", "y", "x"]),
            "flag": [True, False, True],
        }
    )
    frame = as_frame(made)
    assert frame["a"].fill_nan(None).to_list() == [1.5, None, 3.0]
    assert frame["b"].to_list() == [1, 2, 3]
    assert frame["ward"].to_list() == ["north", None, "south"]
    assert frame["mixed"].to_list() == ["1", "two", None]
    assert frame["when"].dtype == pl.Datetime("ns") or isinstance(frame["when"].dtype, pl.Datetime)
    assert frame["when"].null_count() == 1
    assert frame["kind"].to_list() == ["x", "y", "x"]
    assert frame["flag"].to_list() == [True, False, True]
    with pytest.raises(DataError, match='column "a" appears more than once'):
        as_frame(pandas.DataFrame([[1, 2]], columns=["a", "a"]))


def test_run_of_one_algorithm() -> None:
    run = ft.run(
        ft.FedRep(head_epochs=2), "digits", engine="loop", rounds=1, settings={"model.hidden": [4]}, progress=False
    )
    assert run.config.algorithm.options == {"head_epochs": 2}
    assert run.folder.about["engine"] == "loop"
    assert run.path == Path("runs/digits-fedrep")
    assert len(run.metrics()) == 1
    assert repr(run).startswith("Run(fedrep on digits; test accuracy: last ")
    assert "<td>selected</td>" in run._repr_html_()
    assert isinstance(ft.load(run.path), Run)
    tables = {"data": {"source": "digits", "clients": 3}, "model": {"hidden": [4]}, "rounds": 1}
    assert ft.run("ditto", tables, seed=4, progress=False).config.seed == 4
    assert len(ft.run(ft.Local, DigitsConfig(clients=2), rounds=1, settings={"model.hidden": [4]}).clients) == 2
    with pytest.raises(ConfigError, match="task: is a int"):
        ft.run("ditto", 3)  # type: ignore[arg-type]


def test_run_on_data_of_ones_own_can_be_opened_again() -> None:
    data = load(DigitsConfig(clients=3, max_samples=30), seed=0)
    run = ft.run(ft.Ditto, data, rounds=2, settings={"model.hidden": [4]}, progress=False)
    x = data.test.of(0)[0]
    again = ft.load(run.path)
    assert isinstance(again, Run)
    assert again.clients == list(data.clients)
    assert again.personal("client-00").predict(x).shape == (len(x),)
    stored = load(run.config.data, seed=9)
    assert torch.equal(stored.train.x, data.train.x)
    assert (stored.clients, stored.classes, stored.task) == (data.clients, data.classes, data.task)
    with pytest.raises(RunError, match=r"a run already.* out"):
        ft.run(ft.Ditto, data.only([0, 1]), rounds=2, settings={"model.hidden": [4]}, out=run.path, progress=False)
    assert len(load(run.config.data, seed=9).clients) == 3
    (run.path / "data/data.json").write_text("{")
    with pytest.raises(DataError, match="not a folder of data"):
        load(run.config.data, seed=0)


@dataclass(frozen=True)
class Mine(Algorithm):
    """Predicts with the first model."""

    strength: float = 1.0
    title: ClassVar[str] = "Mine"

    def round(self, fed, server):
        return server

    def personal(self, me, server):
        return me.model.params


def test_an_algorithm_of_ones_own_is_named_so_that_others_can_import_it() -> None:
    run = ft.run(Mine(strength=2.0), "digits", rounds=1, settings={"model.hidden": [4]}, progress=False)
    assert run.config.algorithm.name == f"{__name__}:Mine"
    assert run.config.algorithm.options == {"strength": 2.0}
    assert np.isfinite(run.results["last"]["test"]["loss"]["mean"])
