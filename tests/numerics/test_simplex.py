"""The quadratic form on the simplex: the conditions of an optimum, a general solver, and cases solved by hand."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]

from fedtailor.core.random import stream
from fedtailor.numerics.simplex import least_on_simplex
from tests.helpers import F64


def form(size: int, rank: int, ridge: float, name: int) -> torch.Tensor:
    rng = stream("form", size, rank, name)
    root = torch.from_numpy(rng.normal(size=(size, rank)) + 0.5)
    return root @ root.T + ridge * torch.diag(torch.from_numpy(rng.random(size)))


CASES = [(2, 1, 0.1), (5, 3, 0.01), (8, 8, 1.0), (12, 2, 1e-4), (30, 6, 0.1)]


@pytest.mark.parametrize("name", range(3))
@pytest.mark.parametrize(("size", "rank", "ridge"), CASES)
def test_equals_a_general_solver(size: int, rank: int, ridge: float, name: int) -> None:
    q = form(size, rank, ridge, name)
    found = least_on_simplex(q)
    other = minimize(
        lambda a: a @ q.numpy() @ a,
        np.full(size, 1 / size),
        jac=lambda a: 2 * q.numpy() @ a,
        method="SLSQP",
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(size)},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert float(found @ q @ found) <= other.fun + 1e-12
    if ridge >= 0.01:  # else the bottom is too flat for SLSQP
        np.testing.assert_allclose(found.numpy(), other.x, atol=1e-4)


@pytest.mark.parametrize("name", range(5))
@pytest.mark.parametrize(("size", "rank", "ridge"), [*CASES, (60, 10, 0.3)])
def test_conditions_of_an_optimum(size: int, rank: int, ridge: float, name: int) -> None:
    q = form(size, rank, ridge, name)
    a = least_on_simplex(q)
    assert bool((a >= 0).all())
    assert float(a.sum()) == pytest.approx(1, abs=1e-14)
    slope = q @ a
    least = float(a @ slope)
    assert bool((slope >= least - 1e-10 * q.abs().max()).all())  # no other weight would lower it
    assert bool(((slope - least).abs()[a > 0] < 1e-10 * q.abs().max()).all())


def test_by_hand() -> None:
    """Independent estimates: weights by the inverse of their variances."""
    torch.testing.assert_close(
        least_on_simplex(torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64))), torch.tensor([4.0, 2, 1], dtype=F64) / 7
    )
    # the second is so far away that nothing of it is taken: slope 1 at the first, 3 at the second
    assert least_on_simplex(torch.tensor([[1.0, 3.0], [3.0, 10.0]])).tolist() == [1, 0]


def test_an_estimate_without_error_is_taken_alone() -> None:
    q = torch.diag(torch.tensor([1.0, 0.0, 4.0], dtype=F64))
    assert least_on_simplex(q).tolist() == [0, 1, 0]


def test_alike_ones_share() -> None:
    torch.testing.assert_close(least_on_simplex(torch.ones(3, 3, dtype=F64)).sum(), torch.tensor(1.0, dtype=F64))
    torch.testing.assert_close(least_on_simplex(torch.eye(4)), torch.full((4,), 0.25))
    assert least_on_simplex(torch.zeros(1, 1)).tolist() == [1]


@pytest.mark.parametrize("name", range(3))
def test_order_is_irrelevant(name: int) -> None:
    q = form(9, 4, 0.05, name)
    turn = torch.from_numpy(stream("turn", name).permutation(9))
    torch.testing.assert_close(least_on_simplex(q[turn][:, turn]), least_on_simplex(q)[turn], rtol=0, atol=1e-12)
