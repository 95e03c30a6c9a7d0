"""Figures of sites, how sure they are, and what is said of that."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import roc_auc_score

import fedtailor as ft
from fedtailor.core.data import Rows
from fedtailor.core.task import TASKS
from fedtailor.data.splits import starts
from fedtailor.errors import ConfigError
from fedtailor.report.fit_page import fit_page
from fedtailor.tables.site_metrics import bootstrap_intervals, bootstrap_rows, fairness, select_metric, site_metrics
from fedtailor.tables.words import VARIES, fit_sentences, gain_sentence, variation_sentence


def rows_of(sizes: list[int], noise: float, seed: int = 0) -> tuple[Rows, torch.Tensor]:
    rng = np.random.default_rng(seed)
    z = torch.from_numpy(rng.normal(size=(sum(sizes), 1)))
    return Rows(z, z + noise * torch.from_numpy(rng.normal(size=z.shape)), starts(sizes)), z


def test_metrics_in_units_of_the_target() -> None:
    rows, z = rows_of([30, 0, 50], 1.0)
    task = TASKS["regression"]()
    found = site_metrics(task, select_metric(task, "mae"), {"personal": z}, rows, 10.0)
    error = 10 * (rows.y - z)[:30, 0]
    assert found["mae"]["personal"][0] == pytest.approx(float(error.abs().mean()))
    assert found["mse"]["personal"][0] == pytest.approx(float(error.square().mean()))
    assert np.isnan(found["rmse"]["personal"][1])


@pytest.mark.parametrize("sites", [3, 20])
def test_intervals_tell_a_gain_from_noise(sites: int) -> None:
    rows, z = rows_of([60] * sites, 1.0)
    task = TASKS["regression"]()
    metric = select_metric(task, "")
    said = {"personal": z, "alone": 0 * z, "common": z + 0.01 * torch.sin(50 * z)}
    figures = site_metrics(task, metric, said, rows, 1.0)[metric.name]
    found = bootstrap_intervals(metric, figures, bootstrap_rows(metric, said, rows, 1.0, 0), [60] * sites, 0)
    assert found["differences"]["alone"]["ci"][0] > 0
    assert found["differences"]["common"]["ci"][0] < 0 < found["differences"]["common"]["ci"][1]
    low, high = found["sites"][0]["ci"]
    assert low < figures["personal"][0] < high
    record = {"metric": "rmse", "differences": found["differences"]}
    assert "chance" in gain_sentence(record, "common")
    assert "chance" not in gain_sentence(record, "alone")


def test_auroc_of_draws_is_that_of_scikit_learn() -> None:
    from fedtailor.tables.site_metrics import _auroc

    rng = np.random.default_rng(1)
    y, scores = rng.integers(2, size=50), rng.integers(5, size=50).astype(float)
    assert _auroc(scores, y) == pytest.approx(roc_auc_score(y, scores))


def test_fairness_names_the_worst_site() -> None:
    found = fairness(["a", "b", "c"], [0.5, float("nan"), 0.9], higher_is_better=True)
    assert (found["worst"], found["worst_value"]) == ("a", 0.5)


def test_a_fit_shows_the_metric_that_was_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x, site = rng.normal(size=160), np.repeat(["a", "b", "c", "d"], 40)
    rows = pl.DataFrame({"x": x, "y": np.where(x + rng.normal(size=160) > 0, "ill", "well"), "site": site})
    run = ft.fit(rows, "y", client_column="site", metric="auroc", out=tmp_path / "out", progress=False)
    record = run.record
    assert (record["metric"], record["higher_is_better"]) == ("auroc", True)
    assert record["means"]["baseline"] == 0.5
    row = record["sites"]["a"]
    assert row["personal"] == row["metrics"]["auroc"]["personal"] > 0.5
    assert {"accuracy", "brier", "log_loss", "calibration_error"} <= row["metrics"].keys()
    assert [about for about, _ in fit_sentences(record)] == ["gain", "gain", "gain", "sites", "fairness"]
    with pytest.raises(ConfigError, match=r'"aurocc".*"auroc"'):
        ft.fit(rows, "y", client_column="site", metric="aurocc", out=tmp_path / "other", progress=False)


def test_the_record_has_plots_and_a_data_card(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    site = np.repeat(["a", "b", "c"], 60)
    x = rng.normal(size=180) + 4 * (site == "b")
    rows = pl.DataFrame({"x": x, "z": rng.normal(size=180), "y": 3 * x + rng.normal(size=180), "site": site})
    run = ft.fit(rows, "y", client_column="site", out=tmp_path / "out", progress=False)
    card = run.record["card"]
    assert [name for name, _ in card["b"]["drift"]] == ["x"]
    assert card["b"]["rows"] == run.record["sites"]["b"]["train"]
    assert run.record["plots"]["residuals"].keys() == {"a", "b", "c"}
    low, *_, high = run.record["plots"]["residuals"]["a"]
    assert low < 0 < high
    by_id = {section.id: section for section in fit_page(run.path).sections}
    assert [chart.id for chart in by_id["quality"].charts] == ["residuals"]
    assert by_id["summary"].text[0]
    assert {row[5].text for row in by_id["sites"].tables[0].rows} <= {"gains", "may be noise", "loses"}


def test_which_mixed_models_serve_is_said() -> None:
    sites = {
        "a": {"weights": {"mixedmodel-full-seed0": 0.5, "linearalone-seed0": 0.5}},
        "b": {
            "weights": {"mixedmodel-full-seed0": 0.25, "mixedmodel-intercept-seed0": 0.25, "mixedmodel-none-seed0": 0.5}
        },
        "c": {},
    }
    words = variation_sentence({"sites": sites})
    assert re.findall(r"(\d+) % ([\w ]+)", words) == [("25", VARIES["intercept"]), ("75", VARIES["full"])]
    assert variation_sentence({"sites": {"a": {"weights": {"linearalone-seed0": 1.0}}}}) == ""
