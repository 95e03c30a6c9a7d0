"""Trees that all sites share, on what a mixed model leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import fedtailor as ft
from fedtailor.algorithms._programs import boosting
from fedtailor.algorithms._programs.boosting import FEWEST_IN_LEAF, RATE, RIDGE
from fedtailor.serving.predict import predict_by_site
from fedtailor.tables.boosted_trees import TREES_FOLDER
from fedtailor.tables.shared_trees import SharedTrees, fit_shared_trees

SITES, ROWS = 30, 20


def rows(seed: int, effect: float, task: str = "number") -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Features, targets that depend on the size of the first feature, and folds."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SITES * ROWS, 3))
    score = effect * (np.abs(x[:, 0]) - 0.8)
    if task == "classes":
        y = torch.from_numpy((rng.random(len(x)) < 1 / (1 + np.exp(-3 * score))).astype(np.int64))
    elif task == "counts":
        y = torch.from_numpy(rng.poisson(np.exp(score)))[:, None]
    else:
        y = torch.from_numpy(score + 0.5 * rng.normal(size=len(x)))[:, None]
    return torch.from_numpy(x), y, np.tile(np.arange(5), len(x) // 5)


def grown(seed: int, effect: float, task: str = "number") -> SharedTrees | None:
    x, y, folds = rows(seed, effect, task)
    outputs = 2 if task == "classes" else 1
    base = torch.zeros((len(x), outputs), dtype=torch.float64)
    base = base.log_softmax(1) if task == "classes" else base
    site = np.arange(len(x)) // ROWS
    return fit_shared_trees(x, y, [base] * 6, folds, site, task == "classes")


@pytest.mark.parametrize("task", ["number", "classes", "counts"])
def test_an_effect_that_sites_share_is_found(task: str) -> None:
    found = grown(0, 2.0, task)
    assert found is not None
    x = torch.tensor([[-2.0, 0, 0], [0.0, 0, 0], [2.0, 0, 0]], dtype=torch.float64)
    low, middle, high = found.trees(x)[:, -1].tolist()
    assert min(low, high) > middle + 1.0
    assert bool(found.out_of_fold.isfinite().all())


def test_there_are_no_trees_where_there_is_nothing_to_find() -> None:
    assert [grown(seed, 0.0) for seed in (1, 2)] == [None, None]


def test_four_sites_are_enough_where_all_gain_alike() -> None:
    """How sure a gain is depends on how far it varies between sites, not on how large it is."""
    x, y, folds = rows(0, 2.0)
    base = torch.zeros((len(x), 1), dtype=torch.float64)
    site = np.arange(len(x)) * 4 // len(x)
    assert fit_shared_trees(x, y, [base] * 6, folds, site, False) is not None


def test_what_one_large_site_has_is_not_shared() -> None:
    x, y, folds = rows(0, 2.0)
    rng, own = np.random.default_rng(9), len(x) * 4 // 5
    y[own:] = torch.from_numpy(rng.normal(size=(len(x) - own, 1)))  # the other sites have no effect
    base = torch.zeros((len(x), 1), dtype=torch.float64)
    site = np.maximum(np.arange(len(x)) - own, 0) // ROWS + (np.arange(len(x)) >= own)
    assert fit_shared_trees(x, y, [base] * 6, folds, site, False) is None
    everywhere = np.arange(len(x)) // ROWS
    assert fit_shared_trees(x, y, [base] * 6, folds, everywhere, False) is not None


def test_the_first_split_is_that_of_histograms_summed_over_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = rows(3, 2.0)
    edges = boosting.edges_of_counts(boosting.count_marks(x.numpy()))
    gradients = -y[:, 0].numpy()
    sums = np.zeros((3, boosting.BINS, 2))  # feature, bin: gradients and rows
    for site in range(SITES):  # each adds its own
        at = slice(site * ROWS, (site + 1) * ROWS)
        for j in range(3):
            bins = np.searchsorted(edges[j], x[at, j].numpy())
            sums[j, :, 0] += np.bincount(bins, gradients[at], boosting.BINS)
            sums[j, :, 1] += np.bincount(bins, minlength=boosting.BINS)
    best, split = -np.inf, (0, 0.0)
    g, n = sums[0].sum(0)
    for j in range(3):
        for k in range(len(edges[j])):
            left, rows_left = sums[j, : k + 1].sum(0)
            if min(rows_left, n - rows_left) < FEWEST_IN_LEAF:
                continue
            gain = left**2 / (rows_left + RIDGE) + (g - left) ** 2 / (n - rows_left + RIDGE) - g**2 / (n + RIDGE)
            if gain > best:
                best, split = gain, (j, float(edges[j][k]))
    found = grown(3, 2.0)
    assert found is not None
    assert int(found.trees.feature[0]) == split[0]
    assert float(found.trees.threshold[0]) == pytest.approx(split[1])
    assert float(found.trees.value.abs().max()) <= RATE * boosting.FARTHEST


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[ft.Fit, pl.DataFrame]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(40 * 15, 3))
    site = np.repeat(np.arange(40), 15)
    y = 3 * np.abs(x[:, 0]) + 2 * x[:, 1] * (x[:, 2] > 0) + rng.normal(size=40)[site] + 0.3 * rng.normal(size=len(x))
    frame = pl.DataFrame({f"x{j}": x[:, j] for j in range(3)} | {"y": y, "site": [f"s{i}" for i in site]})
    out = tmp_path_factory.mktemp("shared") / "fit"
    return ft.fit(frame, "y", client_column="site", out=out, progress=False), frame


def test_a_fit_serves_them_and_beats_its_linear_models(fitted: tuple[ft.Fit, pl.DataFrame]) -> None:
    made, _ = fitted
    assert (made.path / TREES_FOLDER / made.record["shared_trees"]).exists()
    weights = [row["shared_trees"] for row in made.record["sites"].values()]
    assert min(weights) > 0.5
    assert all("boosted" in row["served"] for row in made.record["sites"].values())
    means = made.record["means"]
    assert means["personal"] < 0.8 * min(means["alone"], means["common"])


def test_all_rows_at_once_are_predicted_as_by_each_site(fitted: tuple[ft.Fit, pl.DataFrame], tmp_path: Path) -> None:
    made, frame = fitted
    file = tmp_path / "rows.csv"
    frame.drop("y").write_csv(file)
    together, notes = predict_by_site(made.path, file, "site")
    assert not notes
    for name in ("s0", "s17"):
        at = frame["site"] == name
        own = made.personal(name).predict(frame.filter(at).drop("y", "site"))
        np.testing.assert_allclose(together["prediction"].filter(at).to_numpy(), own, rtol=1e-12)


def test_an_exported_model_has_them(fitted: tuple[ft.Fit, pl.DataFrame], tmp_path: Path) -> None:
    from fedtailor.serving.export import export, read_safetensors

    made, frame = fitted
    x = frame.head(5).drop("y", "site")
    (file, *_) = export(made.path, "s3", "safetensors", tmp_path / "s3.safetensors")
    np.testing.assert_allclose(read_safetensors(file).predict(x), made.personal("s3").predict(x), rtol=1e-12)
    export(made.path, "s3", "onnx", tmp_path / "s3.onnx")  # compares what the graph says
