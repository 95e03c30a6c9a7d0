"""Advice and worth from sums: against rows, refits, and a simulation whose truth is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from fedtailor.algorithms import make
from fedtailor.api import advise
from fedtailor.core.algorithm import client_functions, reply_example
from fedtailor.core.data import FederatedData
from fedtailor.core.trees import schema
from fedtailor.data.federated import federated
from fedtailor.errors import DataError
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.numerics import site_sums
from fedtailor.numerics.site_sums import SiteSums, fit_shared, pooled_within, refit, simulate
from fedtailor.tables.advice import advise as advise_data
from fedtailor.tables.advice import bootstrap, exchange_sums, gains_of, numbers_only
from fedtailor.tables.worth import worth, worth_of


def made(sites: int = 8, each: int = 20, seed: int = 4) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng, out = np.random.default_rng(seed), {}
    for i in range(sites):
        x = rng.normal(size=(each + i, 3))
        v = np.array([1.0, -0.5, 0.0]) + 0.4 * rng.normal(size=3)
        out[f"site{i}"] = (x, (0.6 * rng.normal() + x @ v + rng.normal(size=len(x)))[:, None])
    return out


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return federated(made(), task="regression", test=0.0, val=0.0)


@pytest.fixture(scope="module")
def sums(data: FederatedData) -> SiteSums:
    return exchange_sums(data)


def test_sums_are_those_of_the_rows(data: FederatedData, sums: SiteSums) -> None:
    x, y = data.train.of(2)
    x = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(sums.a[2], x.mT @ x)
    torch.testing.assert_close(sums.b[2], (x.mT @ y.double())[:, 0])
    assert sums.n[2] == len(x)


def test_what_leaves_does_not_depend_on_rows(data: FederatedData) -> None:
    tables = {"rounds": 1, "data": {"source": "sites"}, "model": {"name": "linear", "dtype": "float64"}}
    config: RunConfig = parse(tables | {"algorithm": {"name": "sitemoments"}}, RunConfig, "test")
    shapes = []
    for rows in (data, data.only([0, 1, 2])):
        experiment = assemble(config, rows)
        program = make("sitemoments", {})
        (each,) = client_functions(program)
        shapes.append(schema(reply_example(program, each, experiment.model)))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("engine", ["loop", "wire"])
def test_advice_is_the_same_on_every_engine_and_call(data: FederatedData, engine: str) -> None:
    first, second = advise_data(data), advise_data(data, engine=engine)
    for name, row in first["sites"].items():
        for key in ("gain", "low", "high", "own_error"):
            assert row[key] == pytest.approx(second["sites"][name][key], rel=1e-9, abs=1e-12)
    assert advise_data(data) == first


def test_a_refit_is_a_fresh_fit_of_the_same_structure(sums: SiteSums) -> None:
    shared = fit_shared(sums)
    for j in (0, 5):
        rest = sums.without(j)
        fresh = site_sums.reml.fit(site_sums._problem(rest), shared.at, torch.zeros_like(shared.factor))
        ours = refit(rest, shared)
        torch.testing.assert_close(ours.beta, fresh.beta[:, 0], rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.factor @ ours.factor.mT, fresh.factor @ fresh.factor.mT, rtol=0, atol=1e-5)


def test_the_matrix_of_worth_is_that_of_refits(sums: SiteSums) -> None:
    """One entry by plain loops: refit without a site, and the squared difference of predictions of new rows."""
    matrix, shared = worth_of(sums), fit_shared(sums)
    assert torch.equal(matrix.diagonal(), torch.zeros(len(matrix), dtype=matrix.dtype))
    to, leaving = 6, 1
    rest = sums.without(leaving)
    found = site_sums.reml.fit(site_sums._problem(rest), shared.at, torch.zeros_like(shared.factor))

    def model_of(factor: torch.Tensor, beta: torch.Tensor) -> np.ndarray:
        a, b = sums.a[to].numpy(), sums.b[to].numpy()
        d = (factor @ factor.mT).numpy()
        return beta.numpy() + d @ np.linalg.solve(np.eye(4) + a @ d, b - a @ beta.numpy())

    difference = model_of(found.factor, found.beta[:, 0]) - model_of(shared.factor, shared.beta)
    n, pooled = float(sums.n[to]), pooled_within(sums).numpy()
    a = sums.a[to].numpy()
    mean = a[:, -1] / n
    new = (a - n * np.outer(mean, mean) + 4 * pooled) / (n + 4) + np.outer(mean, mean)
    assert float(matrix[to, leaving]) == pytest.approx(difference @ new @ difference, rel=1e-3)
    assert bool((matrix >= 0).all())
    assert float(matrix[to, leaving]) > 0


def test_intervals_cover_the_true_expected_gain(sums: SiteSums) -> None:
    """Sums are simulated with coefficients that are known: the expected gain of each site is, too."""
    generator, truth = torch.Generator().manual_seed(3), fit_shared(sums)
    inside = total = 0
    for _ in range(12):
        # all draws of `simulate`, with the coefficients found again from a generator in the same state
        state = generator.get_state()
        drawn = simulate(sums, truth, generator)
        again = torch.Generator()
        again.set_state(state)
        z = torch.randn(sums.b.shape, generator=again, dtype=torch.float64)
        v = truth.beta + z @ truth.factor.mT * truth.noise.sqrt()
        shared = fit_shared(drawn)
        gains = gains_of(drawn, shared, bootstrap(drawn, shared, 15), pooled_within(drawn))
        square = site_sums.moments_of_new_rows(drawn, pooled_within(drawn))
        own, ours = site_sums.own_models(drawn) - v, shared.models(drawn)[0] - v
        true = torch.einsum("si,sij,sj->s", own, square, own) - torch.einsum("si,sij,sj->s", ours, square, ours)
        inside += int(((gains.low <= true) & (true <= gains.high)).sum())
        total += len(true)
    assert 0.8 <= inside / total <= 0.98


def test_own_models_are_ridge_of_the_rows(data: FederatedData, sums: SiteSums) -> None:
    x, y = (part.double().numpy() for part in data.train.of(3))
    centered, level = x - x.mean(0), y.mean()
    best = None
    for penalty in site_sums.PENALTIES:
        hat = centered @ np.linalg.solve(centered.T @ centered + penalty * np.eye(3), centered.T)
        rest = (y[:, 0] - level) - hat @ (y[:, 0] - level)
        score = (rest @ rest) / (len(x) - 1 - np.trace(hat)) ** 2
        slopes = np.linalg.solve(centered.T @ centered + penalty * np.eye(3), centered.T @ (y[:, 0] - level))
        if best is None or score < best[0]:
            best = score, slopes
    assert best is not None
    np.testing.assert_allclose(site_sums.own_models(sums)[3, :3].numpy(), best[1], rtol=1e-7)


def test_a_newcomer_does_not_change_the_fit_of_the_others(data: FederatedData) -> None:
    record = advise_data(data, newcomer="site3")
    assert list(record["sites"]) == ["site3"]
    rows = data.train
    y = rows.y.clone()
    a, b = int(rows.starts[3]), int(rows.starts[4])
    y[a:b] += 100
    other = advise_data(replace(data, train=replace(rows, y=y)), newcomer="site3")
    assert other["noise_sd"] == record["noise_sd"]
    assert other["sites"]["site3"]["gain"] != record["sites"]["site3"]["gain"]


def test_classes_beyond_two_have_no_advice(data: FederatedData) -> None:
    with pytest.raises(DataError):
        numbers_only(replace(data, task="count", outputs=2))


def test_advise_from_frames() -> None:
    frames = {
        name: pl.DataFrame({f"x{j}": x[:, j] for j in range(3)} | {"y": 10 * y[:, 0]})
        for name, (x, y) in made().items()
    }
    record = advise(frames, "y", worth=True)
    assert set(record["sites"]) == set(frames)
    assert record["target"] == "y"
    assert 5 < record["noise_sd"] < 15  # in units of the target: 10
    assert set(record["worth"]["worth"]) == set(frames)


def test_worth_needs_three_sites(data: FederatedData) -> None:
    with pytest.raises(DataError):
        worth(data.only([0, 1]))


def test_a_column_that_gives_the_target_is_refused() -> None:
    with pytest.raises(DataError):
        advise(frames_of(lambda x: 2 * x + 1), "y")
    assert set(advise(frames_of(lambda x: 2 * x + np.sin(9 * x)), "y")["sites"]) == {"a", "b", "c"}


def frames_of(response: Callable[[np.ndarray], np.ndarray]) -> dict[str, pl.DataFrame]:
    x = np.linspace(-1, 1, 60)
    return {name: pl.DataFrame({"x": x[i::3], "y": response(x[i::3])}) for i, name in enumerate("abc")}
