"""Profile intervals by their definition: where the deviance, all else at its best, has risen by 3.84."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

from fedtailor.data.tabular.formula import design_of, kinds_of, parse_formula, rows_of
from fedtailor.inference.formula_data import read_sites
from fedtailor.inference.statistical_model import model
from tests.inference.test_references import table

FORMULA = "y ~ x + (1 + x | site)"
RISE = 3.841459

Site = tuple[NDArray[np.float64], NDArray[np.float64]]


def deviance(sites: list[Site], sd: tuple[float, float], rho: float, sigma: float) -> float:
    """Of maximum likelihood, from the rows: V of every site as it is written."""
    cross = rho * sd[0] * sd[1]
    spread = np.array([[sd[0] ** 2, cross], [cross, sd[1] ** 2]])
    logs, a, b, c, n = 0.0, np.zeros((2, 2)), np.zeros(2), np.zeros(()), 0
    for x, y in sites:
        v = x @ spread @ x.T + sigma**2 * np.eye(len(y))
        inverse = np.linalg.inv(v)
        logs += np.linalg.slogdet(v)[1]
        a, b, c, n = a + x.T @ inverse @ x, b + x.T @ inverse @ y, c + y @ inverse @ y, n + len(y)
    return float(logs + c - b @ np.linalg.solve(a, b) + n * np.log(2 * np.pi))


def test_ends_of_a_profile() -> None:
    formula = parse_formula(FORMULA)
    tables = read_sites(table(), formula)
    design = design_of(formula, "gaussian", kinds_of(formula, tables, "gaussian"))
    sites = [(rows.x[:, :2], rows.y) for rows in (rows_of(design, t, name) for name, t in tables.items())]
    best = 2 * -model(table(), FORMULA, reml=False).estimates.loglik
    found = {(p.kind, p.term): p for p in model(table(), FORMULA, profile=True).estimates.random}

    def least(first: float | None, second: float | None, rho: float | None) -> float:
        """The deviance where one of sd of the intercept, sd of the slope and correlation is given."""

        def value(free: NDArray[np.float64]) -> float:
            a, b, r, s = free
            sd = (np.exp(a) if first is None else first, np.exp(b) if second is None else second)
            return deviance(sites, sd, np.tanh(r) if rho is None else rho, np.exp(s))

        start = np.array([1.0, -0.3, 0.3, 0.4])
        options = {"xatol": 1e-7, "fatol": 1e-9, "maxiter": 4000, "maxfev": 4000}
        return float(minimize(value, start, method="Nelder-Mead", options=options).fun)

    assert least(None, None, None) == pytest.approx(best, abs=1e-5)
    level, slope, rho = (found[k] for k in (("sd", "(Intercept)"), ("sd", "x"), ("correlation", "(Intercept), x")))
    for end in (level.low, level.high):
        assert least(end, None, None) - best == pytest.approx(RISE, abs=1e-3)
    assert least(None, slope.low, None) - best == pytest.approx(RISE, abs=1e-3)
    for end in (rho.low, rho.high):
        assert end is not None
        assert least(None, None, end) - best == pytest.approx(RISE, abs=1e-3)
