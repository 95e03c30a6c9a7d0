"""A model as text, frames, JSON and LaTeX."""

from __future__ import annotations

import json
import math

import pytest

from fedtailor.inference.printed import number
from fedtailor.inference.statistical_model import anova
from tests.inference.test_references import REFERENCES, fitted


def test_numbers_keep_four_digits() -> None:
    assert [number(v) for v in (0.00213456, 0.0, -1.23456789, 123456.789, math.nan)] == [
        "0.002135",
        "0.0000",
        "-1.2346",
        "123456.8",
        "NA",
    ]


def test_every_term_is_in_every_form() -> None:
    one = fitted("small_binary")
    terms = [c.term for c in one.estimates.coefficients]
    assert one.frame()["term"].to_list() == terms
    assert all(term in one.text() and term in one.latex() for term in terms)
    assert [c["term"] for c in json.loads(json.dumps(one.json(), allow_nan=False))["coefficients"]] == terms
    assert repr(one) == str(one) == one.text()


def test_an_interval_of_a_ratio_is_that_of_its_logarithm() -> None:
    one = fitted("small_binary")
    found = next(c for c in one.estimates.coefficients if c.term == "x")
    row = next(line for line in one.latex().splitlines() if line.startswith("x &"))
    low, ratio, high = (f"{math.exp(v):.2f}" for v in (found.low, found.estimate, found.high))
    assert f"{ratio} & $[{low}, {high}]$" in row


def test_shrinkage_is_what_the_conditional_variance_leaves() -> None:
    one = fitted("small_ml")
    sd = {part.term: part.estimate for part in one.estimates.random if part.kind == "sd"}
    for mode in one.estimates.modes:
        assert mode.shrinkage == pytest.approx(min(mode.error**2 / sd[mode.term] ** 2, 1))
        assert 0 < mode.shrinkage <= 1
    assert one.modes_frame()["shrinkage"].to_list() == [mode.shrinkage for mode in one.estimates.modes]


def test_a_comparison_of_variances_is_said_to_be_cautious() -> None:
    test = anova(fitted("small_ml"), fitted("small_nested"))
    assert test.tests_variance
    assert str(test).count("note:") == 2
    assert [m["parameters"] for m in test.json()["models"]] == [5, 9]


def test_the_likelihood_ratio_of_a_cox_model() -> None:
    one, found = fitted("small_cox"), REFERENCES["small_cox"]
    statistic = 2 * (found["loglik"] - found["null"])
    assert f"{statistic:.2f} on {len(found['terms'])} df" in one.text()
