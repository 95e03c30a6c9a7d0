"""MixedPoisson from sums: against statsmodels, against Laplace's approximation of the pooled rows written out here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

from fedtailor.algorithms.linear_alone import LinearAlone
from fedtailor.algorithms.mixed_poisson import MixedPoisson
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.model import Model
from fedtailor.models import build
from tests.algorithms.test_mixed_models import _flat, fitted

Floats = NDArray[np.float64]


def counts(
    seed: int, sites: int = 20, rows: int = 12, level: float = 0.5, slope: float = 0.0
) -> tuple[Floats, NDArray[np.int64], NDArray]:
    rng = np.random.default_rng(seed)
    site = np.repeat([f"s{i:02d}" for i in range(sites)], rows)
    x = rng.normal(size=(len(site), 2))
    own = np.repeat(rng.normal(scale=[slope, 0.0, 0.6], size=(sites, 3)), rows, axis=0)
    eta = (np.column_stack([x, np.ones(len(x))]) * (np.array([0.5, -0.3, level]) + own)).sum(1)
    return x, rng.poisson(np.exp(eta)), site


def federated(x: Floats, y: NDArray[np.int64], site: NDArray) -> tuple[FederatedData, Model]:
    names = sorted(set(site.tolist()))
    starts = torch.tensor([0, *np.cumsum([int((site == name).sum()) for name in names])])
    train = Rows(torch.from_numpy(x), torch.from_numpy(y)[:, None], starts)
    none = Rows(train.x[:0], train.y[:0], torch.zeros_like(starts))
    data = FederatedData("made", "count", tuple(names), train, none, none, 1)
    return data, build("linear", data.shape, 1, seed=0, options={}, dtype=torch.float64)


@pytest.mark.parametrize("level", [-1.0, 0.5, 7.0])
def test_without_effects_it_is_the_poisson_regression_of_all_rows(level: float) -> None:
    sm = pytest.importorskip("statsmodels.api")
    x, y, site = counts(1, level=level)
    wanted = sm.GLM(y, np.column_stack([x, np.ones(len(x))]), family=sm.families.Poisson()).fit(tol=1e-12)
    server, own = fitted(MixedPoisson(effects="none", penalty=0.0, laplace=False), *federated(x, y, site))
    assert server["beta"][:, 0].numpy() == pytest.approx(wanted.params, abs=1e-6)
    assert server["covariance"].diagonal().sqrt().numpy() == pytest.approx(wanted.bse, rel=1e-4)
    assert _flat(own["s03"]) == pytest.approx(wanted.params, abs=1e-6)


def laplace(x: Floats, y: NDArray[np.int64], site: NDArray) -> tuple[Floats, float, dict[str, float]]:
    """Coefficients, standard deviation of the intercepts, and the intercepts' modes, from the pooled rows."""
    design, names = np.column_stack([x, np.ones(len(x))]), sorted(set(site.tolist()))

    def modes(theta: Floats) -> tuple[float, dict[str, float]]:
        eta, sd, total, found = design @ theta[:3], theta[3], 0.0, {}
        for name in names:
            e, c, z = eta[site == name], y[site == name], 0.0
            for _ in range(50):
                rates = np.exp(e + sd * z)
                z += (sd * (c - rates).sum() - z) / (sd**2 * rates.sum() + 1)
            rates = np.exp(e + sd * z)
            total += (c * (e + sd * z) - rates).sum() - z**2 / 2 - np.log(sd**2 * rates.sum() + 1) / 2
            found[name] = sd * z
        return -total, found

    best = minimize(lambda t: modes(t)[0], [0.0, 0.0, np.log(y.mean()), 0.5], method="BFGS", options={"gtol": 1e-6}).x
    return best[:3], abs(float(best[3])), modes(best)[1]


@pytest.mark.parametrize("level", [-1.0, 1.5])
def test_intercepts_are_those_of_laplaces_approximation_on_pooled_rows(level: float) -> None:
    x, y, site = counts(2, level=level)
    beta, sd, modes = laplace(x, y, site)
    server, own = fitted(MixedPoisson(effects="intercept", penalty=0.0), *federated(x, y, site))
    assert server["beta"][:, 0].numpy() == pytest.approx(beta, abs=1e-4)
    assert float(server["factor"][2, 2]) == pytest.approx(sd, abs=1e-4)
    ours = {name: _flat(params)[2] - float(server["beta"][2]) for name, params in own.items()}
    assert ours == pytest.approx(modes, abs=2e-4)


def test_quasi_likelihood_is_near_laplaces_approximation_where_counts_are_large() -> None:
    x, y, site = counts(3, level=3.0)
    exact, quasi = (
        fitted(MixedPoisson(effects="intercept", laplace=laplace), *federated(x, y, site))[0]
        for laplace in (True, False)
    )
    assert quasi["beta"].numpy() == pytest.approx(exact["beta"].numpy(), abs=0.02)
    assert float(quasi["factor"][2, 2]) == pytest.approx(float(exact["factor"][2, 2]), rel=0.1)


def test_evidence_finds_slopes_that_vary() -> None:
    x, y, site = counts(4, sites=30, rows=20, slope=0.5)
    server, _ = fitted(MixedPoisson(), *federated(x, y, site))
    assert server["factor"].diagonal().tolist() == pytest.approx([0.5, 0.0, 0.6], abs=0.2)


def test_what_is_constant_at_each_site_has_no_slope() -> None:
    x, y, site = counts(5)
    x[:, 1] = [int(name[1:]) % 5 for name in site]
    server, _ = fitted(MixedPoisson(effects="diagonal"), *federated(x, y, site))
    assert float(server["factor"][1, 1]) == 0.0
    assert float(server["factor"][2, 2]) > 0.2


def test_alone_is_the_penalised_regression_of_least_left_out_loss() -> None:
    """Refitting without each row, for the penalties that are within half a standard error of the best."""
    x, y, site = counts(6, sites=2, rows=25, level=2.0)
    alone = LinearAlone(penalties=(0.1, 1e3))
    _, own = fitted(alone, *federated(x, y, site))
    a, c = np.column_stack([x, np.ones(len(x))])[site == "s00"], y[site == "s00"].astype(float)
    center = np.array([0.0, 0.0, np.log((c.sum() + 0.5) / len(c))])

    def solved(rows: NDArray, penalty: float) -> Floats:
        weights = np.array([penalty, penalty, alone.intercept])

        def loss(v: Floats) -> float:
            return float(
                (np.exp(a[rows] @ v) - c[rows] * (a[rows] @ v)).sum() + (weights * (v - center) ** 2).sum() / 2
            )

        return minimize(loss, center, method="BFGS", options={"gtol": 1e-8}).x

    everybody = np.arange(len(c))
    left = {}
    for penalty in alone.penalties:
        said = np.array([a[i] @ solved(np.delete(everybody, i), penalty) for i in everybody])
        left[penalty] = float((np.exp(said) - c * said).sum())
    assert left[0.1] < left[1e3] - 5  # no close call
    assert _flat(own["s00"]) == pytest.approx(solved(everybody, 0.1), abs=1e-5)


def test_a_site_without_events_is_not_certain() -> None:
    x, y, site = counts(7, sites=3, rows=8)
    y[site == "s01"] = 0
    _, own = fitted(LinearAlone(), *federated(x, y, site))
    rates = np.exp(np.column_stack([x, np.ones(len(x))])[site == "s01"] @ _flat(own["s01"]))
    assert 0.1 * 0.5 / 8 < rates.mean() < 0.5 / 8  # not more than half an event, nor as good as none
