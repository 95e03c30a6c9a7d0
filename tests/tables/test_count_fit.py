"""Counts and positive numbers with a long tail, from files to predictions, figures and intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import mean_absolute_error, mean_poisson_deviance

from fedtailor.data.tabular.target import suggest_task
from fedtailor.errors import DataError
from fedtailor.serving.predict import predict_file
from fedtailor.tables import boosted_trees, fit, fit_sources
from fedtailor.tables.blend import Candidates
from fedtailor.tables.boosted_trees import tree_outputs
from fedtailor.tables.fit_sources import source_of
from fedtailor.tables.serve import personal


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("files") / "sites", np.random.default_rng(3)
    folder.mkdir()
    for i in range(4):
        x, rows = rng.normal(size=140), 140
        visits = rng.poisson(np.exp(0.8 + 0.5 * x + 0.5 * i))
        cost = np.exp(5 + 0.7 * x + 0.5 * i + rng.normal(scale=0.8, size=rows))
        frame = pl.DataFrame({"x": x, "arm": rng.choice(["a", "b"], rows), "visits": visits, "cost": cost})
        frame.write_csv(folder / f"s{i}.csv")
    return folder


@pytest.fixture(scope="module")
def counted(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("counted") / "fit"
    return out, fit.fit(source_of(sites, "visits", task="count"), out, settings=['data.ignore=["cost"]'])


@pytest.fixture(scope="module")
def logged(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("logged") / "fit"
    return out, fit.fit(source_of(sites, "cost", target_scale="log"), out, settings=['data.ignore=["visits"]'])


def test_figures_of_counts_are_deviances_of_predicted_rates(sites: Path, counted: tuple[Path, dict]) -> None:
    out, record = counted
    assert (record["task"], record["metric"], record["higher_is_better"]) == ("count", "deviance", False)
    _, data = fit_sources.read_source(source_of(sites, "visits", task="count"), settings=['data.ignore=["cost"]'])
    for i, site in enumerate(data.clients):
        x, y = data.test.of(i)
        rates = personal(out, site).predict(x)
        row = record["sites"][site]
        assert row["personal"] == pytest.approx(mean_poisson_deviance(y[:, 0].numpy(), rates), rel=1e-6)
        assert row["metrics"]["rmse"]["personal"] == pytest.approx(np.sqrt(((y[:, 0].numpy() - rates) ** 2).mean()))
        assert row["personal"] < row["baseline"]
    assert record["means"]["personal"] < 0.85 * record["means"]["baseline"]


def test_intervals_of_counts_hold_most_rows(sites: Path, counted: tuple[Path, dict]) -> None:
    out, _ = counted
    inside, rows = 0, 0
    for site in ("s0", "s3"):
        frame = predict_file(personal(out, site), sites / f"{site}.csv", 0.9)
        low, high, y = (frame[name].cast(pl.Float64).to_numpy() for name in ("low 90 %", "high 90 %", "visits"))
        assert (low >= 0).all()
        assert np.sqrt(high) - np.sqrt(frame["prediction"].to_numpy()) == pytest.approx(
            personal(out, site).extras.half_width(0.9, "")
        )
        inside, rows = inside + int(((low <= y) & (y <= high)).sum()), rows + len(y)
    assert 0.85 < inside / rows < 0.99


def test_a_logarithm_is_fitted_and_everything_shown_is_in_units(sites: Path, logged: tuple[Path, dict]) -> None:
    out, record = logged
    assert record["metric"] == "mae"
    frame = pl.read_csv(sites / "s2.csv")
    own = personal(out, "s2")
    middle, (low, high) = own.predict(frame), own.predict_interval(frame, 0.9)
    assert low * high == pytest.approx(middle**2)
    assert np.median(frame["cost"].to_numpy() / middle) == pytest.approx(1.0, abs=0.2)
    assert 0.8 < ((low <= frame["cost"].to_numpy()) & (frame["cost"].to_numpy() <= high)).mean() < 0.98
    _, data = fit_sources.read_source(source_of(sites, "cost", target_scale="log"), settings=['data.ignore=["visits"]'])
    x, y = data.test.of(2)
    true = data.preparation.target.true(y)[:, 0].numpy()
    assert set(true.round(6)) <= set(frame["cost"].to_numpy().round(6))
    assert record["sites"]["s2"]["personal"] == pytest.approx(mean_absolute_error(true, own.predict(x)))


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        (["1", "-2", "3"], {"task": "count"}, "-2 in data row 2, which is no count"),
        (["1", "2.5", "3"], {"task": "count"}, "2.5 in data row 2, which is no count"),
        (["1.5", "0", "3"], {"target_scale": "log"}, "0 in data row 2, which has no logarithm"),
        (["1", "2", "1"], {"task": "count", "target_scale": "log"}, "is for numbers"),
    ],
)
def test_a_target_that_cannot_be_is_refused(values: list[str], options: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{v}\n" for i, v in enumerate(values)))
    with pytest.raises(DataError, match=words):
        fit_sources.read_source(source_of(tmp_path, "y", **options))


def test_counts_and_long_tails_are_recognised() -> None:
    rng = np.random.default_rng(0)
    assert "--task count" in suggest_task(rng.poisson(3, 500).astype(float))
    assert "--target-scale log" in suggest_task(np.exp(rng.normal(size=500)))
    assert suggest_task(rng.normal(50, 10, 500).round()) == ""  # an exam
    assert suggest_task(rng.normal(size=500)) == ""


def test_few_whole_numbers_may_be_counts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        y = np.random.default_rng(1).poisson(1.5, 80)
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "".join(f"{i / 7},{v}\n" for i, v in enumerate(y)))
    _, data = fit_sources.read_source(source_of(tmp_path, "y"))
    assert data.task == "classification"
    assert any("--task count" in note for note in data.notes)


def test_trees_of_counts_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.normal(size=(300, 2)))
    y = torch.from_numpy(rng.poisson(np.exp(0.5 + x[:, 0].numpy())))[:, None]
    base = torch.full((300, 1), float(y.double().mean().log()), dtype=torch.float64)
    found = tree_outputs(boosted_trees.fit_trees(x, y, base, 1, False, 7), x, base, False)
    wanted = HistGradientBoostingRegressor(
        loss="poisson",
        random_state=7,
        learning_rate=0.05,
        max_leaf_nodes=6,
        min_samples_leaf=10,
        l2_regularization=1.0,
        max_iter=100,
        early_stopping=False,
    )
    level = float(base[0].exp())
    inputs = torch.cat([x, base], 1).numpy()
    wanted.fit(inputs, y[:, 0].numpy() / level, sample_weight=np.full(300, level))
    assert found[:, 0].exp().numpy() == pytest.approx(level * wanted.predict(inputs), rel=1e-9)


def test_weights_of_candidates_of_counts_follow_the_deviance() -> None:
    rng = np.random.default_rng(6)
    outputs = torch.from_numpy(rng.normal(scale=0.5, size=(3, 40, 1)))
    y = torch.from_numpy(rng.poisson(2, size=(40, 1)))
    c = Candidates(outputs, y, torch.from_numpy(rng.integers(2, size=40)), 2, False)
    weights = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    gradient, hessian = c.quadratic(weights)

    def total(w: torch.Tensor) -> torch.Tensor:
        return c.losses(c.blend(w)).sum()

    assert torch.allclose(gradient, torch.func.grad(total)(weights))
    full = torch.autograd.functional.hessian(total, weights)
    assert torch.allclose(hessian[1], full[1, :, 1])
