"""An update of a fit: what was a test row stays one, only what changed is trained again, and nothing is lost."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import fedtailor as ft
from fedtailor.data.tabular.earlier_rows import row_keys
from fedtailor.errors import DataError, RunError
from fedtailor.experiments.store import CURRENT, FIT, RunFolder, latest, read_json
from fedtailor.tables import boosted_trees, fit
from fedtailor.tables import update as updating
from fedtailor.tables.fit import ROWS
from fedtailor.tables.serve import personal
from tests.tables.test_table_fit import table

SIZES = [170, 40, 30]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fit of a folder of three sites; the first has trees."""
    folder = tmp_path_factory.mktemp("update")
    (folder / "sites").mkdir()
    for (name,), rows in table(1, SIZES, big=True).group_by("site"):
        rows.drop("site").write_csv(folder / "sites" / f"{name}.csv")
    ft.fit(folder / "sites", "y", out=folder / "fit", progress=False)
    return folder


@pytest.fixture
def here(fitted: Path, tmp_path: Path) -> Path:
    """A copy, which may be changed."""
    shutil.copytree(fitted, tmp_path / "here")
    for config in (tmp_path / "here").rglob("config.toml"):
        assert "sites" in config.read_text()
    return tmp_path / "here"


def more(site: int, rows: int, seed: int = 9) -> pl.DataFrame:
    return table(seed, [rows] * (site + 1)).filter(pl.col("site") == f"s{site}").drop("site")


def updated(here: Path, **options: Any) -> updating.UpdateResult:
    return updating.update(here / "fit", **({"data": here / "sites"} | options))


def test_test_rows_stay_test_rows_and_nothing_leaks(here: Path) -> None:
    old = read_json(here / "fit" / ROWS)
    file = here / "sites/s1.csv"
    shuffled = pl.concat([pl.read_csv(file), more(1, 25)]).sample(fraction=1.0, shuffle=True, seed=3)
    shuffled.write_csv(file)
    result = updated(here)
    new = read_json(result.folder / ROWS)
    assert result.is_new
    told = result.record["update"]["sites"]["s1"]
    assert (told["rows_before"], told["rows_after"], told["added"], told["removed"]) == (40, 65, 25, 0)
    assert told["same_test_rows"] == len(old["s1"]["test"]) == 10
    assert len(new["s1"]["test"]) == 10 + 6  # a quarter of the new ones
    assert set(old["s1"]["test"]) < set(new["s1"]["test"])
    assert set(old["s1"]["train"]) < set(new["s1"]["train"])
    assert all(new[name] == old[name] for name in ("s0", "s2"))
    data = RunFolder(result.folder / result.record["common"])
    assert data.about["train_samples"] == [len(new[f"s{i}"]["train"]) for i in range(3)]
    assert not Counter(new["s1"]["train"]) & Counter(new["s1"]["test"])


def test_only_what_changed_is_grown_again_and_the_rest_begins_where_it_ended(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[tuple[int, bool]] = []
    whole = boosted_trees.fit_trees

    def counted(x: Any, y: Any, base: Any, *args: Any) -> Any:
        grown.append((len(x), base is None))
        return whole(x, y, base, *args)

    monkeypatch.setattr(boosted_trees, "fit_trees", counted)
    pl.concat([pl.read_csv(here / "sites/s2.csv"), more(2, 10)]).write_csv(here / "sites/s2.csv")
    result = updated(here)
    assert grown  # on top of the shared model, which moved
    assert not any(alone for _, alone in grown)  # alone, the rows of s0 are the same
    start = read_json(result.folder / "start/mixedmodel-diagonal-seed0.json")
    assert start["sha256"]
    rows = {"x1": [0.1, -1.0], "x2": [0.4, 1.0]}
    assert np.isfinite(personal(here / "fit", "s0").predict(rows)).all()
    # as a fit that begins from nothing would have it, of the same rows and scales
    shutil.rmtree(result.folder / "start")
    warm = {name: personal(result.folder, name).predict(rows) for name in result.record["sites"]}
    shutil.rmtree(result.folder)
    (here / "fit" / CURRENT).unlink()
    monkeypatch.setattr(updating, "_copy_start_states", lambda *args: None)
    cold = updated(here)
    for name, values in warm.items():
        assert personal(cold.folder, name).predict(rows) == pytest.approx(values, rel=2e-3)


def test_figures_before_and_after_are_those_of_the_models_on_the_same_rows(here: Path) -> None:
    file = here / "sites/s1.csv"
    rows = pl.read_csv(file)
    old = read_json(here / "fit" / ROWS)["s1"]
    pl.concat([rows, more(1, 30)]).write_csv(file)
    result = updated(here)
    told = result.record["update"]["sites"]["s1"]
    x = rows.drop("y")
    before = read_json(here / "fit" / FIT)["sites"]["s1"]["personal"]
    assert told["before"] == pytest.approx(before, rel=1e-9)  # the same rows, the same model
    # by hand: the test rows are those whose predictions give the figure of the first record
    from fedtailor.data.tabular.earlier_rows import _hash_rows, _target_bytes
    from fedtailor.tables.serve import Personal

    first: Personal = _first(here, "s1")
    assert first.preparation is not None
    target = first.preparation.target
    numeric = {name: x[name].to_numpy() for name in x.columns}
    features = first.preparation.encode("s1", numeric, {}, "rows")
    keys = _hash_rows(features, _target_bytes(target.standardise(rows["y"].to_numpy()), ()))
    at = np.array([key in old["test"] for key in keys])
    new = personal(here / "fit", "s1").predict(x.filter(pl.Series(at)))
    rmse = float(np.sqrt(np.mean((new - rows["y"].to_numpy()[at]) ** 2)))
    assert told["after"] == pytest.approx(rmse, rel=1e-9)


def test_an_update_is_explained_on_the_rows_it_was_fitted_to(here: Path) -> None:
    pl.concat([pl.read_csv(here / "sites/s1.csv"), more(1, 30)]).write_csv(here / "sites/s1.csv")
    result = updated(here)
    run = RunFolder(result.folder / result.record["common"])
    assert row_keys(updating.rows_of_update(result.folder, run)) == read_json(result.folder / ROWS)


def _first(here: Path, site: str) -> Any:
    (here / "fit" / CURRENT).rename(here / "aside.json")
    try:
        return personal(here / "fit", site)
    finally:
        (here / "aside.json").rename(here / "fit" / CURRENT)


def test_new_rows_and_new_sites_from_python(here: Path) -> None:
    run = ft.load(here / "fit")
    assert isinstance(run, ft.api.Fit)
    shutil.copytree(here / "sites", here / "moved")
    again = updating.update(here / "fit", data=here / "moved")
    assert not again.is_new
    assert not (here / "fit/update-1").exists()
    # relative to where the rows of the fit are
    config = RunFolder(here / "fit" / run.record["common"]).config
    assert Path(config.data.path).exists()  # type: ignore[union-attr]
    new = run.update({"s1": more(1, 12), "s9": more(0, 30, seed=4)}, progress=False)
    assert new.sites == ["s0", "s1", "s2", "s9"]
    assert new.record["update"]["new_sites"] == ["s9"]
    assert new.record["update"]["sites"]["s1"]["added"] == 12
    assert np.isfinite(new.personal("s9").predict({"x1": [0.1], "x2": [0.2]})).all()
    assert ft.load(here / "fit").path == here / "fit/update-1"
    third = new.update({"s9": more(0, 10, seed=5)}, progress=False)
    assert third.path == here / "fit/update-2"
    assert third.record["update"]["sites"]["s9"]["rows_before"] == 30


def test_other_columns_are_refused_and_nothing_is_lost(here: Path) -> None:
    for file in (here / "sites").iterdir():
        pl.read_csv(file).with_columns(pl.lit(1.5).alias("weight") * pl.col("x1")).write_csv(file)
    with pytest.raises(DataError, match='columns changed: "weight" is new'):
        updated(here)
    with pytest.raises(DataError, match='no column "x2"'):
        updating.update(here / "fit", rows={"s1": more(1, 5).drop("x2")})
    assert latest(here / "fit") == here / "fit"
    assert np.isfinite(personal(here / "fit", "s0").predict({"x1": [0.1], "x2": [0.2]})).all()


def test_after_a_kill_the_earlier_models_serve_and_the_update_goes_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"x1": [0.3], "x2": [1.0]}
    before = personal(here / "fit", "s1").predict(rows)
    pl.concat([pl.read_csv(here / "sites/s1.csv"), more(1, 30)]).write_csv(here / "sites/s1.csv")

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fit, "table_record", killed)
        with pytest.raises(KeyboardInterrupt):
            updated(here)
    assert personal(here / "fit", "s1").predict(rows) == before
    made = {p: p.stat().st_mtime_ns for p in (here / "fit/update-1").glob("*/results.json")}
    assert made
    result = updated(here)
    assert {p: p.stat().st_mtime_ns for p in made} == made  # not trained again
    assert latest(here / "fit") == result.folder
    assert personal(here / "fit", "s1").predict(rows) != before


def test_what_cannot_be_updated_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a fit"):
        updating.update(tmp_path)
