"""Models in float64 get the numbers of the user's files unrounded, in training and afterwards."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fedtailor as ft
from fedtailor.data.sources.site_data import SiteData, load_site
from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import RunFolder
from fedtailor.serving.export import export, read_safetensors
from fedtailor.serving.onboard import onboard
from fedtailor.serving.predict import predict_file
from fedtailor.sklearn import PersonalizedRegressor
from fedtailor.tables.serve import Personal, personal
from tests.data.test_sources import idx

A, B = 2.0**24, 2.0**24 + 1  # the same number in float32


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two files with numbers that need more than float32, and a configuration that leaves them as they are."""
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    for name in ("north", "south"):
        table = pl.DataFrame({"a": [A, B] * 10, "b": [0.1, 0.2, 0.3, 0.4] * 5, "y": [A + 2.5, B + 0.5] * 10})
        table.write_csv(f"sites/{name}.csv")
    source: dict[str, Any] = {"source": "folder", "path": "sites", "target": "y", "task": "regression"}
    source |= {"standardise": "none", "standardise_target": False}
    config = {"rounds": 1, "data": source, "model": {"name": "linear", "dtype": "float64"}}
    return config | {"local": {"lr": 1e-20}}


def test_training_data(sites: dict[str, Any]) -> None:
    data = build_experiment(parse(sites)).data
    for rows in (data.train, data.val, data.test):
        assert rows.x.dtype == rows.y.dtype == torch.float64
        assert {tuple(row) for row in rows.x.tolist()} <= {(A, 0.1), (A, 0.3), (B, 0.2), (B, 0.4)}
        assert set(rows.y.flatten().tolist()) <= {A + 2.5, B + 0.5}
    assert {A, B} == set(data.train.x[:, 0].tolist())


def by_hand(own: Personal) -> list[float]:
    """What a linear model says of A and B."""
    w, b = own.params["out.weight"][0], own.params["out.bias"]
    wanted = [float(w[0] * a + w[1] * 0.5 + b) for a in (A, B)]
    assert wanted[0] != wanted[1]
    return wanted


def test_rows_that_are_predicted(sites: dict[str, Any]) -> None:
    runner.start(parse(sites), Path("run"))
    own = personal(Path("run"), "north")
    wanted = pytest.approx(by_hand(own), rel=1e-15)
    frame = pl.DataFrame({"a": [A, B], "b": [0.5, 0.5]})
    frame.write_csv("new.csv")
    assert own.predict(frame).tolist() == wanted
    assert predict_file(own, Path("new.csv"))["prediction"].to_list() == wanted
    (file, _) = export(Path("run"), "north", "safetensors")
    assert read_safetensors(file).predict(frame).tolist() == wanted
    (graph, _) = export(Path("run"), "north", "torch")
    found = torch.export.load(graph).module()(own.encode(own.table(Path("new.csv"), frame)))
    assert found.flatten().tolist() == wanted
    onboard(Path("run"), Path("sites/north.csv"), "late", epochs=0)
    late = personal(Path("run"), "late")
    assert late.predict(frame).tolist() == pytest.approx(by_hand(late), rel=1e-15)


def test_data_that_is_kept(sites: dict[str, Any]) -> None:
    loaded = build_experiment(parse(sites)).data
    settings = {"model.name": "linear", "model.dtype": "float64", "local.lr": 1e-20}
    run = ft.run("local", loaded, rounds=1, settings=settings, out="kept", progress=False)
    again = runner.reload_experiment(RunFolder(run.path)).data
    assert torch.equal(again.train.x, loaded.train.x)
    site = SiteData(path=Path("sites/north.csv"), target="y", numeric=("a", "b"), standardise="none")
    assert {A, B} == set(load_site(site, "north", seed=0).train.x[:, 0].tolist())


def test_estimators_of_scikit_learn(tmp_path: Path) -> None:
    """The same numbers far from zero: standardised, a float32 keeps few digits of what makes rows differ."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 1))
    model = PersonalizedRegressor(rounds=2, algorithm="local", settings={"model.name": "linear"}).fit(x, x[:, 0])
    near = np.array([[0.5], [0.5 + 1e-12]])
    first, second = model.predict(near)
    assert first != second


def test_made_numbers() -> None:
    table = {"data": {"source": "polynomial", "clients": 2, "samples": 20}, "model": {"name": "linear"}}
    wide = build_experiment(parse(table | {"model": {"name": "linear", "dtype": "float64"}})).data
    x = wide.train.x[:, 1]
    assert torch.equal(wide.train.x[:, 2], x * x)  # as float64 has it
    narrow = build_experiment(parse(table)).data
    assert torch.equal(narrow.train.x, wide.train.x.float())


def test_pixels_are_scaled_in_the_width_of_the_model(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    images = np.arange(256, dtype=np.uint8).repeat(4).reshape(256, 2, 2)
    for stem in ("train", "t10k"):
        (raw / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (raw / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(256, dtype=np.uint8) % 10)))
    table = {"data": {"source": "mnist", "clients": 2, "partition": "iid", "test": 0, "val": 0}}
    for dtype in (torch.float32, torch.float64):
        model = {"name": "linear", "dtype": str(dtype).removeprefix("torch.")}
        found = build_experiment(parse(table | {"model": model}), tmp_path).data.train.x
        wanted = (torch.arange(256).to(dtype) * (1 / 255) - 0.5) / 0.5
        assert torch.equal(found[:, 0, 0, 0].unique(), wanted)
