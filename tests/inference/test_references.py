"""Models against lme4, lmerTest and survival fitted to the pooled rows: references.R makes references.json."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fedtailor.inference.statistical_model import StatisticalModel, anova, model

REFERENCES: dict[str, Any] = json.loads(Path(__file__).with_name("references.json").read_text(encoding="utf-8"))
MODELS = {name: found for name, found in REFERENCES.items() if "formula" in found}
SMALL = [name for name, found in MODELS.items() if found["file"] == "table"]
REAL = [name for name in MODELS if name not in SMALL]
ESTIMATE, ERROR, LOGLIK, LAPLACE = 1e-4, 1e-3, 1e-3, 1e-2
INFINITE = 10.0  # R's standard error of a coefficient that has no finite estimate, or R's estimate of it


def table() -> pl.DataFrame:
    return pl.DataFrame(REFERENCES["table"], strict=False)


@cache
def fitted(name: str) -> StatisticalModel:
    found = MODELS[name]
    data = table() if found["file"] == "table" else Path(os.environ["FEDTAILOR_DATA"]) / found["file"]
    options = {"site": found.get("site", "site" if found["file"] == "table" else "")}
    return model(
        data,
        found["formula"],
        found["family"],
        reml=found.get("reml", True),
        profile="profile" in found,
        **options,
    )


def plain(term: str) -> str:
    return term.strip("`").replace(" ", "").replace("**", "^")


def check_equal(name: str) -> None:
    found, ours = MODELS[name], fitted(name).estimates
    by_term = {plain(c.term): c for c in ours.coefficients}
    finite = 0
    for i, term in enumerate(found["terms"]):
        theirs, error = found["estimate"][i], found["error"][i]
        if theirs is None or plain(term) in map(plain, ours.diverging):
            assert plain(term) not in by_term or plain(term) in map(plain, ours.diverging)
            continue
        coefficient = by_term[plain(term)]
        finite += 1
        assert coefficient.estimate == pytest.approx(theirs, abs=ESTIMATE)
        assert coefficient.error == pytest.approx(error, abs=ERROR)
        if found.get("df"):
            assert coefficient.df == pytest.approx(found["df"][i], rel=1e-3)
            assert coefficient.p == pytest.approx(found["p"][i], rel=1e-2, abs=1e-12)
    assert finite >= len(found["terms"]) / 2
    is_laplace = ours.method == "ML (Laplace)"
    assert ours.loglik == pytest.approx(found["loglik"], abs=LAPLACE if is_laplace else LOGLIK)
    assert ours.rows == found["rows"]
    for ours_is, key in ((ours.aic, "aic"), (ours.bic, "bic"), (ours.events, "events"), (ours.null_loglik, "null")):
        if key in found:
            assert ours_is == pytest.approx(found[key], abs=2 * LAPLACE)
    if "spread" in found:
        assert sorted(p.estimate for p in ours.random) == pytest.approx(sorted(found["spread"]), abs=ERROR)
    for site, term, value, error in zip(*found.get("modes", {}).values(), strict=True):
        if ":" not in site:  # groups inside a site stay there
            (mode,) = [m for m in ours.modes if (m.site, plain(m.term)) == (site, plain(term))]
            assert (mode.estimate, mode.error) == pytest.approx((value, error), abs=ERROR)
    if "profile" in found:
        order = {(p.kind, p.group, p.term): (p.low, p.high) for p in ours.random}
        ends = sorted(v for pair in order.values() for v in pair if v is not None)
        assert ends == pytest.approx(sorted(v for pair in found["profile"] for v in pair), abs=2e-3, rel=2e-3)


@pytest.mark.parametrize("name", SMALL)
def test_equal_to_the_pooled_fit(name: str) -> None:
    check_equal(name)


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_equal_to_the_pooled_fit_on_real_tables(name: str) -> None:
    check_equal(name)


def test_a_likelihood_ratio_is_that_of_r() -> None:
    models = [model(table(), f, site="site") for f in ("y ~ x + (1 | site)", "y ~ x + arm + (1 + x | site)")]
    test, found = anova(*models), REFERENCES["small_anova"]
    assert test.statistic == pytest.approx(found["chisq"], abs=1e-3)
    assert test.df == found["df"]
    assert test.p == pytest.approx(found["p"], rel=1e-2)


def test_what_repeats_other_columns_is_dropped_by_name() -> None:
    assert fitted("small_aliased").estimates.dropped == ("twice",)
