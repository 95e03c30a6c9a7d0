"""New rows against those of training: indices by hand, columns that moved, and rows that did not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import chi2_contingency  # type: ignore[import-untyped]
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli.main import app
from fedtailor.errors import DataError, RunError
from fedtailor.tables import fit as fitting
from fedtailor.tables.drift import drift_of, quantiles, stability


def rows(seed: int, n: int, sites: tuple[str, ...] = ("north", "south")) -> pl.DataFrame:
    draw, parts = np.random.default_rng(seed), []
    for site in sites:
        age, dose = draw.normal(50, 10, n), draw.exponential(2, n)
        gaps = [None if gone else float(v) for v, gone in zip(dose, draw.random(n) < 0.1, strict=True)]
        arm = draw.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
        y = age / 10 + dose + draw.normal(size=n)
        parts.append(pl.DataFrame({"site": [site] * n, "age": age, "dose": gaps, "arm": arm, "y": y}))
    return pl.concat(parts)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drift")
    rows(1, 300).write_csv(folder / "all.csv")
    fitting.fit({"path": str(folder / "all.csv"), "target": "y", "client_column": "site"}, folder / "out")
    return folder / "out"


def test_indices_by_hand() -> None:
    index, distance, chance = stability([30, 50, 20], [100, 100, 200])
    p = np.array([30.5, 50.5, 20.5]) / 101.5
    q = np.array([100.5, 100.5, 200.5]) / 401.5
    assert index == pytest.approx(float(((p - q) * np.log(p / q)).sum()))
    assert distance == pytest.approx(0.8 - 0.5)
    wanted = chi2_contingency([[30, 50, 20], [100, 100, 200]])
    assert chance == pytest.approx(wanted.pvalue)
    assert stability([1, 2], [0, 0]) == (0.0, 0.0, 1.0)


def test_quantiles_of_sums_are_those_of_all_rows() -> None:
    draw = np.random.default_rng(0)
    parts = [draw.normal(size=4000), draw.normal(1, 2, size=1000), np.zeros(0)]
    found = quantiles(parts)
    values = np.concatenate(parts)
    np.testing.assert_allclose(found, np.quantile(values, np.linspace(0.1, 0.9, 9)), atol=2 * np.ptp(values) / 480)
    assert len(quantiles([np.ones(5)])) == 0


def test_rows_of_the_same_kind_have_not_drifted(fitted: Path, tmp_path: Path) -> None:
    rows(2, 200).write_csv(tmp_path / "new.csv")
    found = drift_of(fitted, tmp_path / "new.csv")
    assert list(found["sites"]) == ["north", "south"]
    assert not any(each["drifted"] for site in found["sites"].values() for each in site["columns"])
    assert not any(site["prediction"]["drifted"] for site in found["sites"].values())
    north = {each["column"]: each for each in found["sites"]["north"]["columns"]}
    assert north["dose"]["missing"] == pytest.approx([0.1, 0.1], abs=0.06)


def test_what_moved_is_named_at_its_site(fitted: Path, tmp_path: Path) -> None:
    new = rows(3, 200)
    south = pl.col("site") == "south"
    new = new.with_columns(
        age=pl.when(south).then(pl.col("age") + 10).otherwise(pl.col("age")),
        arm=pl.when(~south & (pl.col("arm") == "a")).then(pl.lit("d")).otherwise(pl.col("arm")),
        dose=pl.when(~south & (pl.int_range(pl.len()) % 2 == 0)).then(None).otherwise(pl.col("dose")),
    )
    new.write_csv(tmp_path / "new.csv")
    found = drift_of(fitted, tmp_path / "new.csv")
    by = {n: {e["column"]: e for e in s["columns"] if e["drifted"]} for n, s in found["sites"].items()}
    assert set(by["south"]) == {"age"}
    assert set(by["north"]) == {"arm", "dose"}
    moved = by["south"]["age"]
    mine = new.filter(south)["age"].mean()
    assert moved["means"][0] == pytest.approx(mine, abs=1e-6)
    assert moved["smd"] == pytest.approx(1.0, abs=0.2)
    assert "higher" in moved["words"]
    assert "mean 6" in moved["words"]
    assert by["north"]["arm"]["unknown"] == pytest.approx(new.filter(~south & (pl.col("arm") == "d")).height / 200)
    assert by["north"]["arm"]["more_unknown"]
    assert by["north"]["dose"]["more_missing"]
    assert all(each["words"] for columns in by.values() for each in columns.values())
    assert found["sites"]["south"]["prediction"]["drifted"]
    assert any("age" in line and "south" in line for line in found["words"])


def test_the_same_in_python_and_by_the_command(fitted: Path, tmp_path: Path) -> None:
    new = rows(4, 100, ("north",)).with_columns(pl.col("age") + 15)
    new.write_csv(tmp_path / "new.csv")
    found = ft.load(fitted).drift(new, site="north")  # type: ignore[union-attr]
    assert found["sites"]["north"]["columns"][0]["column"] == "age"
    told = json.loads(CliRunner().invoke(app, ["drift", str(fitted), str(tmp_path / "new.csv"), "--json"]).output)
    assert told["words"] == found["words"]
    done = CliRunner().invoke(app, ["drift", str(fitted), str(tmp_path / "new.csv")])
    assert done.exit_code == 0, done.output
    assert all(line in " ".join(done.output.split()) for line in found["words"][:1])


def test_what_cannot_be_compared_is_said(fitted: Path, tmp_path: Path) -> None:
    rows(4, 50, ("west", "north")).write_csv(tmp_path / "new.csv")
    assert drift_of(fitted, tmp_path / "new.csv")["words"][-1].endswith(": west")
    with pytest.raises(RunError, match='no site "west"'):
        drift_of(fitted, tmp_path / "new.csv", "west")
    rows(4, 50).drop("site").write_csv(tmp_path / "plain.csv")
    with pytest.raises(DataError, match='no column "site"'):
        drift_of(fitted, tmp_path / "plain.csv")
    with pytest.raises(RunError, match="not the folder of a fit"):
        drift_of(tmp_path, tmp_path / "new.csv")
