"""Formulas, and designs that are the same at every site whatever rows it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from fedtailor.data.tabular.formula import RandomTerm, parse_formula
from fedtailor.errors import ConfigError, DataError, UserError
from fedtailor.inference.formula_data import agreement, load_formula, read_agreement
from fedtailor.inference.statistical_model import anova, model
from tests.inference.test_sums import rows


def test_terms_in_brackets_are_taken_out() -> None:
    found = parse_formula("score ~ age + dose * arm + offset(log(t)) + (1 + dose | site) + (0 + age || site/ward)")
    assert (found.response, found.fixed, found.offset, found.site) == ("score", "age + dose * arm", "log(t)", "site")
    assert found.random == (
        RandomTerm("1 + dose", "site"),
        RandomTerm("0 + age", "site", False),
        RandomTerm("0 + age", "ward", False),
    )


@pytest.mark.parametrize(
    "text",
    [
        "y",
        "~ x",
        "y ~ ",
        "y ~ (x",
        "y ~ x)",
        "y ~ (1 | )",
        "y ~ (| g)",
        "y ~ (1 | a + b)",
        "y ~ x - (1 | g)",
        "y ~ `x",
        "y ~ x +",
    ],
)
def test_a_formula_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_formula(text)


def test_levels_are_those_of_all_sites_in_order() -> None:
    frames = {
        "north": pl.DataFrame({"y": [1.0, 2, 3, 5], "stage": ["2", "10", "2", "10"], "z": ["b", "a", "b", "b"]}),
        "south": pl.DataFrame({"y": [2.0, 4, 3, 1], "stage": ["1", "2", "1", "2"], "z": ["b", "b", "c", "b"]}),
    }
    design, data = load_formula(frames, "y ~ C(stage) + z", "gaussian")
    assert design.fixed == ("(Intercept)", "C(stage)2", "C(stage)10", "zb", "zc")
    first = data.train.of(0)[0][:, :5].tolist()
    assert first[0] == [1, 1, 0, 1, 0]
    assert first[1] == [1, 0, 1, 0, 0]
    assert data.train.of(1)[0][2, :5].tolist() == [1, 0, 0, 0, 1]


def test_names_that_python_cannot_read() -> None:
    frame = rows().rename({"x": "log.dose (mg)", "y": "blood.pressure"})
    fitted = model(frame, "blood.pressure ~ `log.dose (mg)` + (1 | site)")
    plain = model(rows(), "y ~ x + (1 | site)")
    assert [c.term for c in fitted.estimates.coefficients] == ["(Intercept)", "log.dose (mg)"]
    assert fitted.estimates.loglik == plain.estimates.loglik


def test_an_agreement_is_the_same_design(tmp_path: Any) -> None:
    file = tmp_path / "agreed.toml"
    text = "y ~ x * arm + (1 + x | site)"
    file.write_text(agreement(rows(), text, "gaussian"))
    design, _ = load_formula(rows(), text, "gaussian")
    agreed = read_agreement(file)
    assert (agreed.features, agreed.options, agreed.program) == (design.features, design.options, design.program)


@pytest.mark.parametrize(
    ("formula", "family", "kind"),
    [
        ("y ~ . + (1 | site)", "gaussian", ConfigError),
        ("y ~ x + strata(site)", "gaussian", ConfigError),
        ("Surv(time, event) ~ x + strata(ward)", "cox", ConfigError),
        ("y ~ x + (1 | site) + (1 | row)", "gaussian", DataError),
        ("y ~ x + (1 | site) + (1 | region)", "gaussian", DataError),
        ("y ~ log(x - 100) + (1 | site)", "gaussian", DataError),
        ("y ~ noted + (1 | site)", "gaussian", DataError),
        ("y ~ scale(x) + (1 | site)", "gaussian", ConfigError),
        ("y ~ center(x) + (1 | site)", "gaussian", ConfigError),
        ("y ~ nothing + (1 | site)", "gaussian", DataError),
        ("y ~ strange(x) + (1 | site)", "gaussian", ConfigError),
        ("arm ~ x + (1 | site)", "binomial", DataError),
        ("y ~ x + (1 | site)", "binomial", DataError),
        ("y ~ x + (1 | site)", "poisson", DataError),
        ("time ~ x", "cox", ConfigError),
        ("Surv(time, event) ~ x + (1 | site)", "cox", ConfigError),
        ("count ~ x + (1 | site) + (1 | ward)", "poisson", ConfigError),
        ("y ~ x + (1 | site) + (1 | site)", "gaussian", ConfigError),
        ("y ~ log(x) + (1 | site)", "gaussian", DataError),
        ("y ~ x + (1 | site)", "gamma", ConfigError),
    ],
)
def test_what_is_not_possible_is_said(formula: str, family: Any, kind: type[Exception]) -> None:
    frame = rows().with_columns(
        pl.int_range(pl.len()).alias("row"),
        pl.col("site").str.replace("site[01]", "west").alias("region"),
        pl.when(pl.int_range(pl.len()) == 7).then(pl.lit("none")).otherwise(pl.col("x").cast(pl.String)).alias("noted"),
    )
    with pytest.raises(kind):
        model(frame, formula, family, site="site")


def test_a_power_as_r_writes_it() -> None:
    ours, python = (model(rows(), f"y ~ I(x{sign}2) + (1 | site)").estimates for sign in ("^", "**"))
    assert [c.term for c in ours.coefficients] == [c.term for c in python.coefficients] == ["(Intercept)", "I(x^2)"]
    assert ours.loglik == python.loglik


def test_where_sites_are_files_a_factor_inside_them_is_not_the_site() -> None:
    frames = {str(k[0]): part.drop("site") for k, part in rows().partition_by("site", as_dict=True).items()}
    for text in ("y ~ x + (1 | ward) + (1 | site)", "y ~ x + (1 | ward) + (1 | clinic)", "y ~ x + (1 | site/ward)"):
        design, _ = load_formula(frames, text, "gaussian")
        assert (design.group, len(design.random), len(design.nested)) == ("ward", 1, 1)
    inside = load_formula(frames, "y ~ x + (1 | ward)", "gaussian")[0]
    assert (inside.formula.site, inside.random, inside.group) == ("site", (), "ward")
    told = {name: frame.with_columns(pl.lit(name).alias("clinic")) for name, frame in frames.items()}
    assert load_formula(told, "y ~ x + (1 | clinic)", "gaussian")[0].random == (("(Intercept)",),)


def test_the_level_whose_probability_is_modelled_is_named() -> None:
    frame = rows().with_columns(pl.when(pl.col("event") == 1).then(pl.lit("yes")).otherwise(pl.lit("no")).alias("sick"))
    assert any('"yes"' in note for note in model(frame, "sick ~ x + (1 | site)", "binomial").estimates.notes)


def test_a_level_that_was_not_agreed_on_is_refused(tmp_path: Any) -> None:
    from fedtailor.data.sources.site_data import SiteData, load_site

    about = agreement(rows(), "y ~ arm + (1 | site)", "gaussian")
    import tomllib

    frame = rows().filter(pl.col("site") == "site0").with_columns(pl.lit("d").alias("arm"))
    frame.write_csv(tmp_path / "rows.csv")
    config = SiteData.model_validate(tomllib.loads(about)["data"] | {"path": tmp_path / "rows.csv"})
    with pytest.raises(DataError, match='"d"'):
        load_site(config, "site0", seed=0)
    rows().filter(pl.col("site") == "site0").write_csv(tmp_path / "rows.csv")
    ours = load_site(config, "site0", seed=0)
    _, pooled = load_formula(rows(), "y ~ arm + (1 | site)", "gaussian")
    assert ours.features == pooled.features
    assert ours.train.x.tolist() == pooled.train.of(0)[0].tolist()


def test_separation_is_named() -> None:
    frame = rows().with_columns((pl.col("x") > 0.1).cast(pl.Int64).alias("sick"))
    found = model(frame, "sick ~ x + arm", "binomial", site="site").estimates
    assert "x" in found.diverging
    early = rows().with_columns(pl.when(pl.col("arm") == "c").then(0).otherwise(pl.col("event")).alias("event"))
    assert model(early, "Surv(time, event) ~ x + arm", "cox", site="site").estimates.diverging == ("armc",)


def test_a_variance_of_zero_is_said() -> None:
    sites, each = 6, 10
    y = np.tile(np.arange(each) - 4.5, sites)  # the same at all: less than chance would have them differ
    frame = pl.DataFrame({"g": np.repeat(np.arange(sites), each).astype(str), "y": y, "x": np.sin(np.arange(60.0))})
    found = model(frame, "y ~ x + (1 | g)").estimates
    assert found.is_singular
    assert found.random[0].estimate == 0
    assert found.loglik == pytest.approx(model(frame, "y ~ x", site="g").estimates.loglik, abs=1e-8)


def test_a_variance_of_zero_has_no_correlation() -> None:
    y, x = np.tile(np.arange(10) - 4.5, 6), np.sin(np.arange(60.0))
    frame = pl.DataFrame({"g": np.repeat(np.arange(6), 10).astype(str), "y": y, "x": x})
    level, slope, correlation, _ = model(frame, "y ~ x + (1 + x | g)").estimates.random
    assert level.estimate == 0 or slope.estimate == 0
    assert np.isnan(correlation.estimate)


def test_one_site_has_no_variance_between_sites() -> None:
    one = rows().filter(pl.col("site") == "site0")
    with pytest.raises(UserError):
        model(one, "y ~ x + (1 | site)")
    assert model(one, "y ~ x", site="site").estimates.rows == 24


def test_what_cannot_be_estimated_is_refused() -> None:
    frame = rows().with_columns((2 * pl.col("x") + 1).alias("y"))
    with pytest.raises(DataError):
        model(frame, "y ~ x + (1 | site)")
    with pytest.raises(DataError):
        model(rows().head(3), "y ~ x + (1 + x | arm)")
    with pytest.raises(DataError):
        model(rows().with_columns(pl.lit(0).alias("event")), "Surv(time, event) ~ x", "cox", site="site")


def test_models_of_other_rows_are_not_compared() -> None:
    one = model(rows(), "y ~ x + (1 | site)")
    with pytest.raises(UserError):
        anova(one, model(rows(each=20), "y ~ x + arm + (1 | site)"))
    with pytest.raises(UserError):
        anova(one, model(rows(), "y ~ exposure + (1 | site)"))
