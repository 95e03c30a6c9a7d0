"""Mixed models from sums: against statsmodels, against plain code, and at their limits."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.algorithms.linear_alone import LinearAlone
from fedtailor.algorithms.mixed_logit import MixedLogit
from fedtailor.algorithms.mixed_model import MixedModel
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.models import build
from tests.helpers import federate, models, run

Floats = NDArray[np.float64]
TABLES = {
    "exam": ("school", "normexam", ["standLRT", "schavg"], "standLRT"),
    "math": ("School", "MathAch", ["SES", "MEANSES"], "SES"),
    "radon": ("county.name", "log.radon", ["basement", "uranium"], "basement"),
    "oxboys": ("Subject", "height", ["age"], "age"),
}
has_data = pytest.mark.skipif("FEDTAILOR_DATA" not in os.environ, reason="needs the real data under FEDTAILOR_DATA")


def federated(x: Floats, y: NDArray, site: NDArray, outputs: int = 1) -> tuple[FederatedData, Model]:
    is_class = y.dtype == np.int64
    names = sorted(set(site.tolist()))
    order = np.concatenate([np.flatnonzero(site == name) for name in names])
    starts = torch.tensor([0, *np.cumsum([int((site == name).sum()) for name in names])])
    targets = torch.from_numpy(y[order]) if is_class else torch.from_numpy(y[order])[:, None]
    train = Rows(torch.from_numpy(x[order]), targets, starts)
    none = Rows(train.x[:0], train.y[:0], torch.zeros_like(starts))
    data = FederatedData(
        "made", "classification" if is_class else "regression", tuple(names), train, none, none, outputs
    )
    return data, build("linear", data.shape, outputs, seed=0, options={}, dtype=torch.float64)


def fitted(algorithm: Algorithm, data: FederatedData, model: Model) -> tuple[Tree, dict[str, Params]]:
    fed = federate(algorithm, data, model, "vmap")
    server = run(fed, 1)
    assert not fed.record.faults
    return server, models(fed, server)


def made(seed: int, sites: int = 12, rows: int = 15) -> tuple[Floats, Floats, NDArray]:
    rng = np.random.default_rng(seed)
    site = np.repeat([f"s{i:02d}" for i in range(sites)], rows)
    x = rng.normal(size=(sites * rows, 3))
    own = np.repeat(rng.normal(scale=[0.0, 0.7, 0.0, 1.0], size=(sites, 4)), rows, axis=0)
    y = ((np.column_stack([x, np.ones(len(x))])) * (np.array([1.0, -0.5, 0.2, 3.0]) + own)).sum(1)
    return x, y + rng.normal(scale=0.5, size=len(y)), site


def log_likelihood(x: Floats, y: Floats, site: NDArray, beta: Floats, cov: Floats, noise: float, reml: bool) -> float:
    """-2 log-likelihood by the large covariance matrices themselves."""
    z = np.column_stack([x, np.ones(len(x))])
    total, curvature = 0.0, np.zeros((4, 4))
    for name in np.unique(site):
        a, rest = z[site == name], y[site == name] - z[site == name] @ beta
        v = noise * np.eye(len(a)) + a @ cov @ a.T
        total += np.linalg.slogdet(v)[1] + rest @ np.linalg.solve(v, rest)
        curvature += a.T @ np.linalg.solve(v, a)
    return float(total + (np.linalg.slogdet(curvature)[1] if reml else 0.0))


@pytest.mark.parametrize("reml", [True, False])
def test_no_step_from_the_fit_lowers_the_deviance(reml: bool) -> None:
    x, y, site = made(1)
    server, _ = fitted(MixedModel(effects="diagonal", reml=reml), *federated(x, y, site))
    beta, noise = server["beta"][:, 0].numpy(), float(server["noise"])
    cov = (server["factor"] @ server["factor"].mT).numpy() * noise
    best = log_likelihood(x, y, site, beta, cov, noise, reml)
    for j in range(4):
        for times in (0.9, 1.1):
            moved = cov.copy()
            moved[j, j] = cov[j, j] * times + 1e-4
            assert log_likelihood(x, y, site, beta, moved, noise, reml) > best - 1e-7
        step = np.zeros(4)
        step[j] = 0.01
        assert log_likelihood(x, y, site, beta + step, cov, noise, False) > log_likelihood(
            x, y, site, beta, cov, noise, False
        )
    assert log_likelihood(x, y, site, beta, cov, noise * 1.03, reml) > best
    assert log_likelihood(x, y, site, beta, cov, noise * 0.97, reml) > best


def test_personal_models_are_the_best_predictions() -> None:
    """v = beta + Psi Z' V^-1 (y - X beta), by the large matrices."""
    x, y, site = made(2)
    server, own = fitted(MixedModel(effects="full"), *federated(x, y, site))
    beta, noise = server["beta"][:, 0].numpy(), float(server["noise"])
    cov = (server["factor"] @ server["factor"].mT).numpy() * noise
    z = np.column_stack([x, np.ones(len(x))])[site == "s03"]
    v = noise * np.eye(len(z)) + z @ cov @ z.T
    wanted = beta + cov @ z.T @ np.linalg.solve(v, y[site == "s03"] - z @ beta)
    assert _flat(own["s03"]) == pytest.approx(wanted, abs=1e-9)


def _flat(params: Params) -> Floats:
    weight = next(v for v in params.values() if v.dim() == 2)
    bias = next(v for v in params.values() if v.dim() == 1)
    return np.concatenate([weight[0].numpy(), bias.numpy()])


def test_without_effects_it_is_least_squares_of_all_rows() -> None:
    x, y, site = made(3)
    server, own = fitted(MixedModel(effects="none"), *federated(x, y, site))
    wanted = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    assert server["beta"][:, 0].numpy() == pytest.approx(wanted, abs=1e-9)
    assert all(_flat(params) == pytest.approx(wanted, abs=1e-9) for params in own.values())


def test_what_is_constant_at_each_site_has_no_slope() -> None:
    x, y, site = made(4)
    x[:, 2] = [int(name[1:]) % 5 for name in site]
    server, _ = fitted(MixedModel(effects="diagonal"), *federated(x, y, site))
    assert float(server["factor"][2, 2]) == 0.0
    assert float(server["factor"][1, 1]) > 0.1


def test_evidence_finds_which_coefficients_vary() -> None:
    x, y, site = made(5, sites=30)
    server, _ = fitted(MixedModel(), *federated(x, y, site))
    spread = (server["factor"] @ server["factor"].mT).diagonal().sqrt() * server["noise"].sqrt()
    assert spread[[1, 3]].tolist() == pytest.approx([0.7, 1.0], rel=0.35)
    assert float(spread[[0, 2]].max()) < 0.15


@pytest.mark.data
@has_data
@pytest.mark.parametrize("name", TABLES)
def test_statsmodels_says_the_same(name: str) -> None:
    """Fixed effects to 1e-4, variances to 1 %, predictions to 1e-3."""
    lmm = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    place, target, fixed, slope = TABLES[name]
    frame = pl.read_csv(Path(os.environ["FEDTAILOR_DATA"]) / "multisite" / f"{name}.csv", infer_schema_length=None)
    x, y, site = (
        frame[fixed].to_numpy().astype(float),
        frame[target].to_numpy(),
        frame[place].cast(pl.String).to_numpy(),
    )
    server, own = fitted(MixedModel(effects="full"), *federated(x, y, site))
    design = np.column_stack([x, np.ones(len(x))])
    at = [fixed.index(slope), len(fixed)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = lmm.MixedLM(y, design, groups=site, exog_re=design[:, at]).fit(
            method=["lbfgs"], gtol=1e-10, maxiter=2000
        )
    assert server["beta"][:, 0].numpy() == pytest.approx(found.fe_params, abs=1e-4)
    cov = (server["factor"] @ server["factor"].mT * server["noise"]).numpy()[np.ix_(at, at)]
    assert cov.diagonal() == pytest.approx(np.asarray(found.cov_re).diagonal(), rel=0.01)
    assert float(server["noise"]) == pytest.approx(found.scale, rel=0.01)
    effects = np.array([np.asarray(found.random_effects[s]) for s in site])
    wanted = design @ found.fe_params + (design[:, at] * effects).sum(1)
    ours = np.array([row @ _flat(own[s]) for row, s in zip(design, site, strict=True)])
    assert np.abs(ours - wanted).max() < 1e-3 * max(1.0, y.std())


def classes(seed: int, sites: int = 15, rows: int = 40) -> tuple[Floats, NDArray[np.int64], NDArray]:
    rng = np.random.default_rng(seed)
    site = np.repeat([f"s{i:02d}" for i in range(sites)], rows)
    x = rng.normal(size=(len(site), 2))
    score = x @ np.array([1.0, -0.5]) + np.repeat(rng.normal(scale=1.0, size=sites), rows)
    return x, (rng.random(len(site)) < 1 / (1 + np.exp(-score))).astype(np.int64), site


def test_logit_without_effects_is_logistic_regression_of_all_rows() -> None:
    from sklearn.linear_model import LogisticRegression

    x, y, site = classes(1)
    server, _ = fitted(MixedLogit(effects="none", penalty=1.0), *federated(x, y, site, 2))
    wanted = LogisticRegression(C=1.0, tol=1e-10).fit(x, y)
    assert server["beta"][:, 0].numpy() == pytest.approx([*wanted.coef_[0], *wanted.intercept_], abs=2e-4)


def test_logit_finds_intercepts_that_vary() -> None:
    x, y, site = classes(2, sites=40)
    server, own = fitted(MixedLogit(effects="auto"), *federated(x, y, site, 2))
    assert float(server["factor"][-1, -1]) == pytest.approx(1.0, abs=0.35)
    assert server["beta"][:2, 0].tolist() == pytest.approx([1.0, -0.5], abs=0.2)
    assert len({round(float(next(v for v in p.values() if v.dim() == 1)[1]), 3) for p in own.values()}) > 20


def test_alone_is_ridge_with_the_penalty_of_least_left_out_error() -> None:
    from sklearn.linear_model import Ridge

    x, y, site = made(6, sites=2, rows=20)
    alone = LinearAlone()
    _, own = fitted(alone, *federated(x, y, site))
    a, b = x[site == "s00"], y[site == "s00"]

    def left_out(penalty: float) -> float:
        rows = range(len(a))
        kept = [np.delete(np.arange(len(a)), i) for i in rows]
        # the closed form keeps the mean's share; so does refitting without the row
        return sum(
            float(Ridge(penalty).fit(a[k], b[k]).predict(a[i : i + 1])[0] - b[i]) ** 2
            for i, k in zip(rows, kept, strict=True)
        )

    best = Ridge(min(alone.penalties, key=left_out)).fit(a, b)
    assert _flat(own["s00"]) == pytest.approx([*best.coef_, best.intercept_], abs=1e-8)


def test_a_site_with_one_class_is_not_certain() -> None:
    x, y, site = classes(3, sites=3, rows=6)
    y[site == "s01"] = 1
    data, model = federated(x, y, site, 2)
    _, own = fitted(LinearAlone(), data, model)
    p = model(own["s01"], torch.from_numpy(x[site == "s01"])).softmax(1)[:, 1]
    assert 0.7 < float(p.min()) <= float(p.max()) < 0.999


def several(seed: int, sites: int = 12, rows: int = 40) -> tuple[Floats, NDArray[np.int64], NDArray]:
    """Three classes; the second is more or less frequent by site."""
    rng = np.random.default_rng(seed)
    site = np.repeat([f"s{i:02d}" for i in range(sites)], rows)
    x = rng.normal(size=(len(site), 2))
    scores = np.column_stack([x @ [0.0, 0.0], x @ [1.0, -0.5], x @ [-0.7, 0.3] - 0.4])
    scores[:, 1] += np.repeat(rng.normal(scale=1.2, size=sites), rows)
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return x, np.array([rng.choice(3, p=row) for row in p], dtype=np.int64), site


def test_logit_of_three_classes_without_effects_is_multinomial_regression_of_all_rows() -> None:
    sm = pytest.importorskip("statsmodels.api")
    x, y, site = several(1)
    design = np.column_stack([x, np.ones(len(x))])
    wanted = sm.MNLogit(y, design).fit(disp=False, tol=1e-10)
    server, own = fitted(MixedLogit(effects="none", penalty=0.0), *federated(x, y, site, 3))
    assert server["beta"][:, 0].numpy() == pytest.approx(wanted.params.T.reshape(-1), abs=1e-5)
    assert server["covariance"].diagonal().sqrt().numpy() == pytest.approx(wanted.bse.T.reshape(-1), rel=1e-3)
    weight, bias = own["s00"]["out.weight"].numpy(), own["s00"]["out.bias"].numpy()
    p = np.exp(x @ weight.T + bias)
    assert p / p.sum(1, keepdims=True) == pytest.approx(wanted.predict(design), abs=1e-5)


def test_logit_of_three_classes_has_a_spread_for_each_contrast() -> None:
    server, _ = fitted(MixedLogit(effects="intercept"), *federated(*several(2, sites=30), 3))
    spread = server["factor"].diagonal()
    assert spread[[0, 1, 3, 4]].tolist() == [0.0] * 4
    assert float(spread[2]) == pytest.approx(1.2, abs=0.35)
    assert float(spread[5]) < 0.4


@pytest.mark.parametrize("laplace", [False, True])
def test_logit_has_no_slope_for_what_is_constant_at_each_site(laplace: bool) -> None:
    x, y, site = several(3)
    x[:, 1] = [int(name[1:]) % 5 for name in site]
    server, _ = fitted(MixedLogit(effects="diagonal", laplace=laplace), *federated(x, y, site, 3))
    assert server["factor"].diagonal()[[1, 4]].tolist() == [0.0, 0.0]
    assert float(server["factor"].diagonal().max()) > 0.5


def test_logit_by_laplace_is_that_of_pooled_rows() -> None:
    from tests.algorithms.test_pooled_logit import pooled

    x, y, site = classes(4)
    names, at = np.unique(site, return_inverse=True)
    beta, sd, u = pooled(np.column_stack([x, np.ones(len(x))]), y.astype(float), at)
    server, own = fitted(MixedLogit(effects="intercept", penalty=0.0, laplace=True), *federated(x, y, site, 2))
    assert server["beta"][:, 0].numpy() == pytest.approx(beta, abs=2e-3)
    assert float(server["factor"][-1, -1]) == pytest.approx(sd, abs=2e-3)
    ours = np.array([float(own[name]["out.bias"][1]) - float(server["beta"][-1]) for name in names])
    assert ours == pytest.approx(sd * u, abs=5e-3)


def left_out(z: Floats, y: Floats, fit_rest: Callable[[Floats, Floats], Floats]) -> float:
    """Squared errors of rows that are predicted from the others, one by one."""
    each = np.arange(len(y))
    return float(sum((y[i] - z[i] @ fit_rest(z[each != i], y[each != i])) ** 2 for i in each))


def test_a_client_keeps_its_own_model_where_that_predicts_its_left_out_rows_better() -> None:
    """Rows of one client are of another world; what is kept follows from a plain leave-one-out."""
    x, y, site = made(3, sites=6, rows=12)
    y[site == "s00"] = 300 * np.random.default_rng(0).normal(size=12)
    data, model = federated(x, y, site)
    server, plain = fitted(MixedModel(effects="intercept"), data, model)
    guarded_server, guarded = fitted(MixedModel(effects="intercept", keep_own=True), data, model)
    alone = fitted(LinearAlone(), data, model)[1]
    assert torch.equal(server["beta"], guarded_server["beta"])
    factor, beta, kept = server["factor"].numpy(), server["beta"][:, 0].numpy(), []
    for name in sorted(set(site)):
        z, own_y = np.column_stack([x[site == name], np.ones(12)]), y[site == name]

        def shared(a: Floats, b: Floats) -> Floats:
            cov = factor @ np.linalg.inv(np.eye(4) + factor.T @ a.T @ a @ factor) @ factor.T
            return np.asarray(beta + cov @ a.T @ (b - a @ beta))

        def own(a: Floats, b: Floats) -> Floats:
            center, level = a[:, :3].mean(0), b.mean()
            v = np.linalg.solve(
                (a[:, :3] - center).T @ (a[:, :3] - center) + 1e-4 * np.eye(3), (a[:, :3] - center).T @ (b - level)
            )
            return np.append(v, level - center @ v)

        is_own = left_out(z, own_y, own) < left_out(z, own_y, shared)
        kept.append(is_own)
        wanted = alone[name] if is_own else plain[name]
        for key, value in wanted.items():
            torch.testing.assert_close(guarded[name][key], value)
    assert any(kept[1:])
