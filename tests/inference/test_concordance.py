"""FLamby's TCGA-BRCA: the C-index of a Cox model with regions as strata, as docs/explanation/mixed-models.md has it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from fedtailor.inference.statistical_model import StatisticalModel, model

COVARIATES = 39


def concordance(times: NDArray[np.float64], events: NDArray[np.float64], risk: NDArray[np.float64]) -> float:
    """Harrell's: of pairs of whom one is known to have died first, how often that one had the higher risk."""
    pairs = right = 0.0
    for i in np.flatnonzero(events):
        later = (times > times[i]) | ((times == times[i]) & (events == 0))
        pairs += later.sum()
        right += (risk[later] < risk[i]).sum() + (risk[later] == risk[i]).sum() / 2
    return right / pairs


def test_concordance_by_hand() -> None:
    times, events = np.array([1.0, 2, 3, 4]), np.array([1.0, 0, 1, 1])
    assert concordance(times, events, np.array([4.0, 9, 1, 2])) == pytest.approx(2 / 4)


def by_region(fitted: StatisticalModel, test: pl.DataFrame) -> list[float]:
    weights = {c.term: c.estimate for c in fitted.estimates.coefficients}
    out = []
    for _, part in test.group_by("center", maintain_order=True):
        risk = np.sum([part[name].to_numpy() * w for name, w in weights.items()], axis=0)
        out.append(concordance(part["T"].to_numpy(), part["E"].to_numpy(), risk))
    return out


@pytest.mark.data
def test_tcga_brca() -> None:
    rows = pl.read_csv(Path(os.environ["FEDTAILOR_DATA"]) / "inference/tcga_brca.csv")
    train, test = rows.filter(pl.col("split") == "train"), rows.filter(pl.col("split") == "test")

    def fit(names: list[str]) -> StatisticalModel:
        terms = " + ".join(f"`{name}`" for name in names)
        return model(train, f"Surv(T, E) ~ {terms}", "cox", site="region")

    every = fit(rows.columns[:COVARIATES])
    assert np.mean(by_region(every, test)) == pytest.approx(0.8098, abs=2e-3)
    finite = fit([name for name in rows.columns[:COVARIATES] if name not in every.estimates.diverging])
    assert not finite.estimates.diverging
    assert np.mean(by_region(finite, test)) == pytest.approx(0.8358, abs=2e-3)
