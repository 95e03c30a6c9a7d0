"""A column of very many texts in a fit: from files to predictions, exports and explanations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import fedtailor as ft
from fedtailor.data.tabular.earlier_rows import EarlierRows, row_keys
from fedtailor.experiments.store import read_json
from fedtailor.serving.linear_json import linear_record, predict_by_hand
from fedtailor.tables import fit, fit_sources
from fedtailor.tables.fit_sources import source_of
from fedtailor.tables.serve import personal


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("files") / "sites", np.random.default_rng(2)
    folder.mkdir()
    level = rng.normal(size=70)
    for i in range(3):
        town, x = rng.integers(70, size=110), rng.normal(size=110)
        y = 10 + 2 * level[town] + x + i + rng.normal(scale=0.5, size=110)
        frame = pl.DataFrame({"x": x, "town": [f"t{t}" for t in town], "y": y})
        frame.write_csv(folder / f"s{i}.csv")
    return folder


@pytest.fixture(scope="module")
def fitted(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("many") / "fit"
    return out, fit.fit(source_of(sites, "y"), out)


def test_the_text_is_used(fitted: tuple[Path, dict]) -> None:
    _, record = fitted
    assert record["means"]["personal"] < 0.75 * record["means"]["baseline"]


def test_rows_are_predicted_and_exported_alike(sites: Path, fitted: tuple[Path, dict]) -> None:
    out, _ = fitted
    own, frame = personal(out, "s1"), pl.read_csv(sites / "s1.csv").head(5)
    record = json.loads(json.dumps(linear_record(own)))
    rows = [*frame.drop("y").to_dicts(), {"x": 0.5, "town": "never seen"}, {"x": 0.5, "town": None}]
    assert own.predict(pl.DataFrame(rows)) == pytest.approx([predict_by_hand(record, row)[0] for row in rows])
    assert own.notes


def test_explanations_name_the_statistic(fitted: tuple[Path, dict]) -> None:
    effects = read_json(fitted[0] / "effects.json")
    assert "town (mean y)" in [term["name"] for term in effects["coefficients"]["outputs"][0]["terms"]]
    assert effects["importance"]["columns"][0]["column"] == "town"


def test_an_update_knows_the_rows_again(sites: Path, tmp_path: Path) -> None:
    source = source_of(sites, "y")
    _, before = fit_sources.read_source(source)
    earlier = EarlierRows(before.preparation, row_keys(before), 1)
    keys = earlier.keys["s0"]
    frame = pl.read_csv(sites / "s0.csv")
    site = type(
        "Site",
        (),
        {
            "name": "s0",
            "file": "s0.csv",
            "numeric": {"x": frame["x"].to_numpy()},
            "categorical": {"town": frame["town"].to_list()},
            "y": frame["y"].to_numpy(),
        },
    )
    sides = earlier._sides(site, (), keys)
    assert (sides.count("train"), sides.count("test")) == (len(keys["train"]), len(keys["test"]))


def test_categories_by_force_are_solved_though_sites_have_few_rows_each(tmp_path: Path) -> None:
    """The remedy that a note names; most of 300 columns are constant at a site."""
    rng = np.random.default_rng(1)
    effects, names = rng.normal(size=300), rng.integers(300, size=1000)
    x = rng.normal(size=1000)
    y = x + effects[names] + 0.3 * rng.normal(size=1000)
    columns = {"site": [f"s{i // 25}" for i in range(1000)], "a": x, "product": [f"p{i}" for i in names], "y": y}
    forced = {"data.categorical": ["product"]}
    made = ft.fit(
        pl.DataFrame(columns), "y", client_column="site", settings=forced, out=tmp_path / "out", progress=False
    )
    assert made.record["means"]["personal"] < 0.6 * made.record["means"]["alone"]
