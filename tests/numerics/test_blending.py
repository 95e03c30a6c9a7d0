"""Weights on the simplex against a second computation, and gains by sums against those of pooled rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]

from fedtailor.numerics import site_gains
from fedtailor.numerics.blending import on_simplex, quadratic, row_losses
from fedtailor.tables.model_selection import chance, gains

F64 = torch.float64


@pytest.mark.parametrize("seed", range(4))
def test_the_best_weights_are_those_of_a_general_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, b = rng.normal(size=(20, 4)), 20 * rng.normal(size=4)
    q = x.T @ x
    found = on_simplex(torch.from_numpy(q), torch.from_numpy(b)).numpy()
    wanted = minimize(
        lambda u: u @ q @ u / 2 - b @ u,
        np.full(4, 0.25),
        jac=lambda u: q @ u - b,
        bounds=[(0, 1)] * 4,
        constraints={"type": "eq", "fun": lambda u: u.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    ).x
    assert found == pytest.approx(wanted, abs=1e-5)
    assert found @ q @ found / 2 - b @ found <= wanted @ q @ wanted / 2 - b @ wanted + 1e-7


def test_candidates_that_are_not_allowed_have_no_weight() -> None:
    q, b = torch.eye(3, dtype=F64), torch.tensor([0.0, 5.0, 0.1], dtype=F64)
    assert on_simplex(q, b).tolist() == [0, 1, 0]
    found = on_simplex(q, b, torch.tensor([1, 0, 1]))
    assert found.tolist() == pytest.approx([0.45, 0, 0.55])
    assert torch.equal(on_simplex(torch.stack([q, q]), torch.stack([b, b]))[1], on_simplex(q, b))


@pytest.mark.parametrize("is_class", [True, False])
def test_derivatives_by_weights_are_those_of_the_loss(is_class: bool) -> None:
    rng = np.random.default_rng(0)
    said = torch.from_numpy(rng.normal(size=(3, 9, 2 if is_class else 1)))
    said = said.log_softmax(2) if is_class else said
    y = torch.from_numpy(rng.integers(2, size=9) if is_class else rng.normal(size=(9, 1)))
    rows, at = torch.from_numpy(rng.integers(2, size=9)).to(F64), torch.tensor([0.2, 0.5, 0.3], dtype=F64)

    def loss(weights: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("c,cno->no", weights, said)
        return (row_losses(mixed.log_softmax(1) if is_class else mixed, y, is_class) * rows).sum()

    gradient, hessian = quadratic(said, y, rows, at, is_class)
    torch.testing.assert_close(gradient, torch.autograd.functional.jacobian(loss, at))
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(loss, at))


@pytest.mark.parametrize(("sites", "unequal"), [(1, 0.3), (2, 2.0), (7, 0.3), (8, 2.0), (40, 2.0)])
def test_gains_by_sums_are_those_of_all_rows(sites: int, unequal: float) -> None:
    rng = np.random.default_rng(sites)
    rows = [rng.normal(0.1 * rng.normal(), np.exp(unequal * rng.normal()), rng.integers(2, 60)) for _ in range(sites)]
    least = rng.uniform(0, 0.5, sites)
    wanted = gains(rows, [np.zeros(len(d)) for d in rows], False, least.tolist())
    own = [
        site_gains.gains_of(torch.from_numpy(d), torch.ones(len(d), dtype=F64), torch.full((len(d),), v, dtype=F64))
        for d, v in zip(rows, least.tolist(), strict=True)
    ]
    shared = site_gains.shared_by(
        lambda thresholds: torch.stack([site_gains.below(one, thresholds) for one in own]).sum(0),
        lambda known: torch.stack([site_gains.sums_of(one, known) for one in own]).sum(0),
        torch.tensor(float(sum(map(len, rows))), dtype=F64),
    )
    found = np.array([[float(v) for v in site_gains.shrunk(one, shared)] for one in own])
    assert found == pytest.approx(np.array([[gain.mean, gain.sd] for gain in wanted]), rel=1e-9, abs=1e-12)


def test_what_is_chance_at_a_site_is_what_it_is_in_one_process() -> None:
    rng = np.random.default_rng(0)
    first, second = (torch.from_numpy(rng.normal(size=(6, 3))).log_softmax(1) for _ in range(2))
    assert site_gains.chance(first, second).numpy() == pytest.approx(chance(first.numpy(), second.numpy()))
