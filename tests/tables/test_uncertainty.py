"""Intervals cover as often as they say, small sites lean on all; calibration mends what is wrong, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import fedtailor as ft
from fedtailor.errors import DataError
from fedtailor.tables.calibration import calibrate, fit_calibration
from fedtailor.tables.intervals import LEVELS, half_widths


def test_intervals_cover_new_rows_at_every_size_of_site() -> None:
    rng = np.random.default_rng(0)
    sizes = [4] * 60 + [400] * 3
    inside: dict[float, list[np.ndarray]] = {level: [] for level in LEVELS}
    noise = rng.uniform(0.5, 2.0, size=len(sizes))
    site = np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(5):
        errors = np.abs(rng.normal(size=len(site)) * noise[site])
        widths = half_widths(errors, site, rng.integers(5, size=len(site)), len(sizes))
        assert widths is not None
        assert (np.diff(widths, axis=1) >= 0).all()
        fresh = np.abs(rng.normal(size=(len(sizes), 200)) * noise[:, None])
        for i, level in enumerate(LEVELS):
            inside[level].append((fresh <= widths[:-1, i : i + 1]).mean(1))
    for level, found in inside.items():
        each = np.mean(found, axis=0)
        assert each[:60].mean() == pytest.approx(level, abs=0.04)  # of four rows each
        assert each[60:] == pytest.approx(level, abs=0.06)  # a site with rows has its own width


def test_widths_are_in_the_units_of_errors_and_never_0() -> None:
    rng = np.random.default_rng(0)
    site, folds = np.repeat([0, 1], 200), rng.integers(5, size=400)
    errors = np.where(site == 0, 0.0, np.abs(rng.normal(size=400)))  # the first is predicted without error
    widths, in_grams = half_widths(errors, site, folds, 2), half_widths(1000 * errors, site, folds, 2)
    assert widths is not None
    assert in_grams is not None
    assert (widths > 0).all()
    np.testing.assert_allclose(in_grams, 1000 * widths, rtol=1e-9, atol=0)


def log_odds(p: np.ndarray) -> np.ndarray:
    return np.log(np.stack([1 - p, p], axis=1))


def test_calibration_finds_what_is_wrong_at_one_site() -> None:
    rng = np.random.default_rng(1)
    z, site = rng.normal(size=6000) * 2, np.repeat([0, 1], 3000)
    y = (rng.random(6000) < 1 / (1 + np.exp(-z))).astype(np.int64)
    said = log_odds(1 / (1 + np.exp(-np.where(site == 0, z, 3 * z + 1))))  # the second is overconfident, and shifted
    found = fit_calibration(said, y, site, rng.integers(5, size=6000), 2)
    assert found[0] == pytest.approx([1, 0], abs=0.2)
    assert found[1] == pytest.approx([1 / 3, -1 / 3], abs=0.1)
    assert np.exp(calibrate(said, found[site])).sum(1) == pytest.approx(1)


def test_calibration_leaves_what_is_right() -> None:
    rng = np.random.default_rng(2)
    z = rng.normal(size=500)
    y = (rng.random(500) < 1 / (1 + np.exp(-z))).astype(np.int64)
    site = rng.integers(10, size=500)
    found = fit_calibration(log_odds(1 / (1 + np.exp(-z))), y, site, rng.integers(5, size=500), 10)
    assert found.tolist() == [[1.0, 0.0]] * 10


def test_no_site_is_surer_than_its_rows_allow() -> None:
    """A site without an event in 16 rows, where the model of all says .0025; one with 400 rows; one with events."""
    said = log_odds(np.full(16 + 400 + 16, 0.0025))
    site = np.repeat([0, 1, 2], [16, 400, 16])
    y = np.zeros(len(said), dtype=np.int64)
    y[-8:], said[-16:] = 1, log_odds(np.full(16, 0.5))
    y[16] = 1
    found = fit_calibration(said, y, site, np.arange(len(said)) % 5, 3)
    p = np.exp(calibrate(said, found[site]))[:, 1]
    assert p[:16].sum() == pytest.approx(0.5)  # half an event: Jeffreys
    assert found[1:].tolist() == [[1.0, 0.0]] * 2
    assert fit_calibration(said[:, ::-1], 1 - y, site, np.arange(len(said)) % 5, 3)[0] == pytest.approx(
        found[0] * [1, -1]
    )


def test_a_fit_predicts_with_intervals(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x, site = rng.normal(size=200), np.repeat(["a", "b", "c", "d"], 50)
    rows = pl.DataFrame({"x": x, "y": 100 + 20 * x + rng.normal(scale=10, size=200), "site": site})
    run = ft.fit(rows, "y", client_column="site", out=tmp_path / "out", progress=False)
    own = run.personal("b")
    low, high = own.predict_interval(rows, 0.9)
    assert (high - low) / 2 == pytest.approx(1.645 * 10, rel=0.35)
    narrow = own.predict_interval(rows, 0.72)
    assert (narrow[1] - narrow[0] < high - low).all()
    with pytest.raises(DataError, match=r"from 0.5 to 0.99"):
        own.predict_interval(rows, 0.2)
    newcomer = run.onboard("late", rows.filter(pl.col("site") == "a").drop("site"))
    assert newcomer.predict_interval(rows)[0].shape == (200,)
