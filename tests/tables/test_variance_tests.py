"""Whether an effect differs between sites is a likelihood ratio test of its variance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2  # type: ignore[import-untyped]

from fedtailor.inference.statistical_model import model
from fedtailor.numerics import reml
from fedtailor.tables.variance_tests import difference_tests, problem_of, random_entries

SITES, EACH = 12, 15


def sums(slope: float, seed: int = 2) -> tuple[reml.Problem, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SITES, EACH, 2))
    own = np.stack([0.8 * rng.normal(size=SITES), slope * rng.normal(size=SITES)], 1)
    y = 2 + own[:, :1] + (1 + own[:, 1:]) * x[:, :, 0] - x[:, :, 1] + rng.normal(size=(SITES, EACH))
    design = torch.from_numpy(np.concatenate([x, np.ones((SITES, EACH, 1))], 2))
    response = torch.from_numpy(y)[:, :, None]
    a, b, c = design.mT @ design, design.mT @ response, response.square().sum((1, 2))
    count = torch.full((SITES,), float(EACH), dtype=torch.float64)
    columns = {"x0": x[:, :, 0].ravel(), "x1": x[:, :, 1].ravel(), "y": y.ravel()}
    named = {"g": [f"g{i:02}" for i in range(SITES) for _ in range(EACH)], **columns}
    return problem_of(a, b, c, count, torch.zeros(3, dtype=torch.float64), None), named


def fitted(problem: reml.Problem) -> torch.Tensor:
    at = np.arange(3), np.arange(3)
    return reml.fit(problem, at, torch.zeros((3, 3), dtype=torch.float64)).factor


def test_the_ratio_is_that_of_two_fits() -> None:
    import polars as pl

    problem, rows = sums(0.6)
    p = difference_tests(problem, fitted(problem), {"x0": [0], "x1": [1], "intercept": [2]})
    both = "(0 + x0 + x1 || g) + (1 | g)"
    whole, without = (
        model(pl.DataFrame(rows), f"y ~ x0 + x1 + {random}").estimates.deviance
        for random in (both, "(0 + x1 || g) + (1 | g)")
    )
    assert p["x0"] == pytest.approx(chi2.sf(without - whole, 1) / 2, rel=1e-3)
    assert p["x0"] < 0.001
    assert p["intercept"] < 0.001


def test_an_effect_that_is_common_does_not_differ() -> None:
    found = []
    for seed in range(20):
        problem, _ = sums(0.0, seed)
        found.append(difference_tests(problem, fitted(problem), {"x0": [0]})["x0"])
    assert np.mean(np.array(found) < 0.05) <= 0.2  # 5 %, of 20
    assert max(found) > 0.4


def test_a_column_without_random_effects_has_no_test() -> None:
    problem, _ = sums(0.5)
    factor = torch.diag(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    assert [len(v) for v in random_entries(factor)] == [1, 1]
    assert difference_tests(problem, factor, {"x0": [0]})["x0"] == 1.0
