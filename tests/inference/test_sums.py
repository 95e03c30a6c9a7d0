"""Only sums leave: every way to compute gives the same, and what is sent does not depend on rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from fedtailor import engines
from fedtailor.core.algorithm import client_functions, reply_example
from fedtailor.core.federation import Federation
from fedtailor.core.trees import schema
from fedtailor.errors import RunError
from fedtailor.experiments.building import assemble
from fedtailor.inference.formula_data import load_formula
from fedtailor.inference.statistical_model import Estimates, Request, config_of, fit_design, model

FORMULAS = {
    "gaussian": "y ~ x + arm + (1 | site) + (1 | ward)",
    "binomial": "cbind(cured, 6 - cured) ~ x + (1 | site)",
    "poisson": "count ~ x + offset(log(exposure)) + (1 | site)",
    "cox": "Surv(time, event) ~ x + arm",
}


def rows(sites: int = 3, each: int = 24, seed: int = 3) -> pl.DataFrame:
    rng, n = np.random.default_rng(seed), sites * each
    site = np.repeat(np.arange(sites), each)
    level, x = rng.normal(size=sites)[site], rng.normal(size=n)
    ward = rng.integers(0, 4, n)
    exposure = rng.integers(1, 5, n)
    return pl.DataFrame(
        {
            "site": [f"site{i}" for i in site],
            "ward": [f"w{i}" for i in ward],
            "x": x,
            "arm": [("a", "b", "c")[i % 3] for i in range(n)],
            "exposure": exposure,
            "y": 1000 * (3 + level + 0.5 * x + rng.normal(size=(sites, 4))[site, ward] / 2 + rng.normal(size=n)),
            "cured": rng.binomial(6, 1 / (1 + np.exp(-(level + 0.5 * x)))),
            "count": rng.poisson(exposure * np.exp(0.4 + level / 2 + 0.3 * x)),
            "time": np.ceil(20 * rng.exponential(np.exp(-0.5 * x))),
            "event": (rng.random(n) < 0.7).astype(int),
        }
    )


def numbers(e: Estimates) -> Iterator[float]:
    yield from (e.loglik, e.aic)
    for c in e.coefficients:
        yield from (c.estimate, c.error, c.p)
    for part in e.random:
        yield part.estimate


@pytest.mark.parametrize("family", ["gaussian", "binomial", "cox"])  # poisson is binomial's program
def test_engines_and_secure_sums_agree(family: Any) -> None:
    ways: dict[str, dict[str, Any]] = {
        "vmap": {"engine": "vmap"},
        "wire": {"engine": "wire"},
        "secure": {"secure": True},
    }
    by_way = {
        way: list(numbers(model(rows(), FORMULAS[family], family, site="site", **options).estimates))
        for way, options in ways.items()
    }
    for way, found in by_way.items():
        assert found == pytest.approx(by_way["vmap"], rel=1e-6, abs=1e-9), way


@pytest.mark.parametrize("family", ["gaussian", "poisson", "cox"])
def test_what_is_sent_does_not_depend_on_rows(family: Any) -> None:
    forms = []
    for each in (12, 30):
        design, data = load_formula(rows(each=each), FORMULAS[family], family, "site")
        config = config_of(Request(FORMULAS[family], family, "site"), design)
        experiment = assemble(config, data)
        sent: list[Any] = []
        with engines.open_engine("wire", experiment) as engine:
            fed = RecordingFederation(engine, config.federation.limits)
            fed.sent = sent
            fed.run_round(1, range(len(data.clients)), {})
            assert not fed.record.gathered  # the server looked at no single reply
        names = sorted(client_functions(experiment.algorithm))
        declared = {name: schema(reply_example(experiment.algorithm, name, experiment.model)) for name in names}
        assert {name for name, _ in sent} <= set(names)
        assert all(form == declared[name] for name, form in sent)
        functions = client_functions(experiment.algorithm).values()
        parts = [part for fn in functions for part in (fn.sends if isinstance(fn.sends, tuple) else (fn.sends,))]  # type: ignore[attr-defined]
        assert all(part.sums == ("",) for part in parts if part is not None)
        forms.append(declared)
    assert forms[0] == forms[1]


class RecordingFederation(Federation):
    """Records the form of every reply that the server adds up."""

    sent: list[Any]

    def sum(self, x: Any) -> Any:
        total = super().sum(x)
        if x.path == ():
            self.sent.append((x.call.function, schema(total)))
        return total


def test_a_site_that_is_lost_ends_the_model() -> None:
    design, data = load_formula(rows(), FORMULAS["gaussian"], "gaussian", "site")
    x = data.train.x.clone()
    x[0, 1] = torch.nan
    broken = replace(data, train=replace_x(data.train, x))
    with pytest.raises(RunError, match="site0"):
        fit_design(Request(FORMULAS["gaussian"]), design, broken)


def replace_x(train: Any, x: Tensor) -> Any:
    import copy

    changed = copy.copy(train)
    object.__setattr__(changed, "x", x)
    return changed


def test_leaving_is_a_fresh_fit() -> None:
    whole = model(rows(4), FORMULAS["gaussian"], site="site")
    fresh = model(rows(4).filter(pl.col("site") != "site2"), FORMULAS["gaussian"], site="site")
    left = whole.leave("site2")
    assert left.data.clients == fresh.data.clients
    assert list(numbers(left.estimates)) == pytest.approx(list(numbers(fresh.estimates)), rel=1e-8)
    with pytest.raises(RunError, match="site9"):
        whole.leave("site9")
