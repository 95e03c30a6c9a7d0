"""MixedLogit beside a logistic mixed model of the pooled rows, by Laplace's approximation, written out here."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]

from fedtailor.algorithms.mixed_logit import MixedLogit
from tests.algorithms.test_mixed_models import federated, fitted

Floats = NDArray[np.float64]
TABLES = {"contraception": ("district", "use"), "headache": ("id", "headache")}
has_data = pytest.mark.skipif("FEDTAILOR_DATA" not in os.environ, reason="needs the real data under FEDTAILOR_DATA")


def modes(x: Floats, y: Floats, at: NDArray[np.intp], beta: Floats, sd: float) -> tuple[Floats, Floats]:
    """Per site the random intercept over `sd` with the largest posterior, and the curvature there, by Newton."""
    sites = int(at.max()) + 1
    u, curvature = np.zeros(sites), np.ones(sites)
    for _ in range(50):
        p = 1 / (1 + np.exp(-(x @ beta + sd * u[at])))
        curvature = np.asarray(1 + sd**2 * np.bincount(at, p * (1 - p), sites), dtype=np.float64)
        step = (sd * np.bincount(at, y - p, sites) - u) / curvature
        u = u + np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-10:
            break
    return u, curvature


def pooled(x: Floats, y: Floats, at: NDArray[np.intp]) -> tuple[Floats, float, Floats]:
    """Coefficients, spread and intercepts of the sites that maximise the Laplace approximation of the likelihood."""

    def deviance(theta: Floats) -> float:
        beta, sd = theta[:-1], float(np.exp(theta[-1]))
        u, curvature = modes(x, y, at, beta, sd)
        score = x @ beta + sd * u[at]
        return float(-2 * (y * score - np.logaddexp(0, score)).sum() + (u**2).sum() + np.log(curvature).sum())

    found = minimize(
        deviance, np.append(np.zeros(x.shape[1]), -0.5), method="L-BFGS-B", bounds=[(-20, 20)] * x.shape[1] + [(-6, 3)]
    )
    beta, sd = found.x[:-1], float(np.exp(found.x[-1]))
    return beta, sd, modes(x, y, at, beta, sd)[0]


@pytest.mark.data
@has_data
@pytest.mark.parametrize("name", TABLES)
def test_log_loss_is_that_of_the_pooled_model(name: str) -> None:
    place, target = TABLES[name]
    frame = pl.read_csv(
        Path(os.environ["FEDTAILOR_DATA"]) / "multisite" / f"{name}.csv", infer_schema_length=None, null_values="NA"
    )
    frame = frame.drop_nulls()
    columns = []
    for column in frame.drop(place, target).iter_columns():
        if column.dtype == pl.String:
            columns += [(column == value).to_numpy() * 1.0 for value in sorted(column.unique())[1:]]
        else:
            values = column.to_numpy().astype(float)
            columns.append((values - values.mean()) / values.std())
    x = np.column_stack(columns)
    y = (frame[target] == sorted(frame[target].unique())[1]).to_numpy().astype(np.int64)
    site = frame[place].cast(pl.String).to_numpy()
    test = np.random.default_rng(0).random(len(y)) < 0.25
    test &= np.isin(site, np.unique(site[~test]))

    _, own = fitted(MixedLogit(effects="intercept"), *federated(x[~test], y[~test], site[~test], 2))
    models = {name: torch.cat([p["out.weight"], p["out.bias"][:, None]], 1).numpy() for name, p in own.items()}
    design = np.column_stack([x, np.ones(len(x))])
    ours = np.array([design[i] @ (models[site[i]][1] - models[site[i]][0]) for i in np.flatnonzero(test)])

    names, at = np.unique(site[~test], return_inverse=True)
    beta, sd, u = pooled(design[~test], y[~test].astype(float), at)
    assert 0.1 < sd < 5
    place_of = {n: i for i, n in enumerate(names)}
    theirs = design[test] @ beta + sd * u[[place_of[n] for n in site[test]]]
    losses = [float((np.logaddexp(0, s) - y[test] * s).mean()) for s in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[1] < 0.98 * float(np.log(2))
