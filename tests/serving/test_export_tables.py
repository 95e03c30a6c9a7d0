"""Every model that a fit of tables serves can be exported, and says the same of rows as they stand in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fedtailor as ft
from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.serving.export import ENDINGS, export, read_safetensors
from fedtailor.serving.linear_json import predict_by_hand
from fedtailor.tables.serve import personal
from tests.made_sites import make_sites

ROWS = pl.DataFrame(
    {
        "dose": [0.3, None, 2.0, 1e6, -1.0, 0.5],
        "day": ["2024-01-05", "2024-02-01", None, "2024-03-01", "2024-01-09", "2024-01-10"],
        "arm": ["a", "b", None, "A", "never seen", "b"],
    }
)


def made(task: str) -> pl.DataFrame:
    """A large site where trees help, two small ones; gaps in numbers and categories."""
    rng, parts = np.random.default_rng(3), []
    for site, n in (("large", 260), ("small", 24), ("other", 20)):
        dose, day, arm = rng.uniform(-2, 2, n), rng.integers(0, 90, n), rng.choice(["a", "b"], n)
        y = 20 + 5 * dose + 3 * (arm == "a") + rng.normal(size=n)
        y = y + 40 * (site == "large") * ((dose > 0) != (day > 45))
        label = np.where(y > (40 if site == "large" else 20), "high", "low") if task == "classification" else y
        gap = rng.random((2, n)) < 0.05
        parts.append(
            pl.DataFrame({"dose": dose, "arm": arm, "y": label, "site": [site] * n})
            .with_columns((pl.date(2024, 1, 1) + pl.duration(days=pl.lit(pl.Series(day)))).cast(pl.String).alias("day"))
            .with_columns(
                dose=pl.when(pl.Series(gap[0])).then(None).otherwise(pl.col("dose")),
                arm=pl.when(pl.Series(gap[1])).then(None).otherwise(pl.col("arm")),
            )
        )
    return pl.concat(parts)


@pytest.fixture(scope="module", params=["regression", "classification"])
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param) / "fit"
    ft.fit(made(request.param), "y", client_column="site", out=out, progress=False)
    assert personal(out, "large").extras.trees is not None
    assert personal(out, "small").extras.trees is None
    return out


def wanted(run: Path, site: str) -> np.ndarray:
    own = personal(run, site)
    return own._readable(ROWS)


@pytest.mark.parametrize("site", ["large", "small"])
def test_onnx_takes_columns_as_they_stand_in_a_file(fitted: Path, tmp_path: Path, site: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    file = export(fitted, site, "onnx", tmp_path / "model.onnx")[0]
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert {i.name for i in session.get_inputs()} == {"dose", "day", "arm"}
    days = ROWS["day"].str.to_date().cast(pl.Int32).cast(pl.Float64)  # since 1970-01-01
    inputs: dict[str, Any] = {
        "dose": ROWS["dose"].cast(pl.Float64).fill_null(np.nan).to_numpy()[:, None],
        "day": days.fill_null(np.nan).to_numpy()[:, None],
        "arm": np.array(ROWS["arm"].fill_null("").to_list(), dtype=object)[:, None],
    }
    (found,) = session.run(["prediction"], inputs)
    assert np.abs(found - wanted(fitted, site)).max() < 1e-5 * max(1, np.abs(found).max())


@pytest.mark.parametrize("site", ["large", "small"])
def test_safetensors_hold_trees_calibration_and_intervals(fitted: Path, tmp_path: Path, site: str) -> None:
    own, (file, _) = personal(fitted, site), export(fitted, site, "safetensors", tmp_path / "model.safetensors")
    again = read_safetensors(file)
    assert np.array_equal(again._readable(ROWS), wanted(fitted, site))
    assert again.extras.half_widths == own.extras.half_widths


def test_torch_holds_trees(fitted: Path, tmp_path: Path) -> None:
    file = export(fitted, "large", "torch", tmp_path / "model.pt2")[0]
    own = personal(fitted, "large")
    x = torch.randn((5, 5), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(torch.export.load(file).module()(x), own.readable(own.outputs(x)), rtol=0, atol=1e-8)


def test_json_is_enough_to_predict_by_hand(fitted: Path, tmp_path: Path) -> None:
    (file,) = export(fitted, "small", "json", tmp_path / "small.json")
    record = json.loads(file.read_text())
    kinds = {column["name"]: column["kind"] for column in record["columns"]}
    assert kinds == {"dose": "number", "day": "number", "arm": "category"}
    days = ROWS["day"].str.to_date().cast(pl.Int32).to_list()
    for i, row in enumerate(ROWS.to_dicts()):
        if row["arm"] == "A":
            row["arm"] = "a"  # by hand, categories are written as the file lists them
        assert predict_by_hand(record, row | {"day": days[i]}) == pytest.approx(
            wanted(fitted, "small")[i].tolist(), rel=1e-9
        )
    # a second way: the coefficient of a number is the change per unit
    ys = [predict_by_hand(record, {"dose": dose, "day": 19750, "arm": "a"}) for dose in (0.0, 1.0)]
    dose = record["columns"][0]["coefficients"]
    if record["link"] == "identity":
        assert ys[1][0] - ys[0][0] == pytest.approx(dose[0])
    else:
        odds = [np.log(y[1] / y[0]) for y in ys]
        assert odds[1] - odds[0] == pytest.approx(dose[1])
        assert dose[0] == 0


def test_json_cannot_hold_trees_and_says_what_can(fitted: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"JSON.*--to.*--to"):
        export(fitted, "large", "json", tmp_path / "large.json")
    assert list(tmp_path.iterdir()) == []


def test_a_network_on_a_table_takes_columns_too(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    sites = make_sites(tmp_path / "sites", sites=2)
    data = {"source": "folder", "path": str(sites), "target": "outcome"}
    runner.start(parse({"rounds": 1, "data": data, "model": {"name": "mlp", "hidden": [4]}}), tmp_path / "run")
    file = export(tmp_path / "run", "s1", "onnx", tmp_path / f"model{ENDINGS['onnx']}")[0]
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    row = {"a": [1.0, None], "b": [0.5, -3.0], "ward": ["north", None]}
    inputs = {"a": np.array([[1.0], [np.nan]]), "b": np.array([[0.5], [-3.0]])}
    (found,) = session.run(["prediction"], inputs | {"ward": np.array([["north"], [""]], dtype=object)})
    assert np.abs(found - personal(tmp_path / "run", "s1").predict_proba(row)).max() < 1e-5
    with pytest.raises(RunError, match="is not a linear model of a table"):
        export(tmp_path / "run", "s1", "json", tmp_path / "model.json")
