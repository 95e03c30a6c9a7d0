"""Three ways to a hypergradient: the exact one is that of finite differences, implicit ones converge to the answer."""

import pytest
import torch

from benchmarks.hypergradients import START, answer, error, run


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_unrolled_is_finite_differences(engine: str) -> None:
    found, _ = run("unrolled", 6, engine=engine)
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(START.shape, dtype=START.dtype, generator=draw)
    ends = [run("unrolled", 6, z=START + step * direction, engine=engine)[0]["loss"] for step in (1e-5, -1e-5)]
    assert float(ends[0] - ends[1]) / 2e-5 == pytest.approx(float(found["gradient"] @ direction), rel=1e-8)


def test_more_rounds_bring_the_unrolled_gradient_to_the_answer() -> None:
    away = [error(run("unrolled", rounds)[0]["gradient"], answer()) for rounds in (5, 20, 60)]
    assert away[0] > 0.1 > away[1] > 0.01 > 1e-3 > away[2]


def test_implicit_gradients_converge_to_the_answer() -> None:
    rounds = 120  # w is at the minimum to 1e-8
    series = [error(run("neumann", rounds, terms)[0]["gradient"], answer()) for terms in (5, 20, 80)]
    assert series[0] > 0.1 > series[1] > 1e-3 > series[2]
    conjugate = [error(run("cg", rounds, terms)[0]["gradient"], answer()) for terms in (2, 4, 8)]
    assert conjugate[0] > 0.01 > conjugate[1] > 1e-4 > 1e-6 > conjugate[2]  # as many steps as parameters: exact
    assert error(run("first-order", rounds)[0]["gradient"], answer()) > 0.5
    own = [error(run("own", rounds, terms)[0]["gradient"], answer()) for terms in (80, 160)]
    assert min(own) > 0.5  # it goes to the mean of the clients' inverses, not to the inverse of their mean


def test_trips() -> None:
    """There and back; or there, the outer gradient, each product with the Hessian, and the derivative along q."""
    assert run("unrolled", 6)[1].traffic.trips == 2 * (6 + 1)
    assert run("cg", 6, 4)[1].traffic.trips == 6 + 1 + 4 + 1
    assert run("first-order", 6)[1].traffic.trips == 6 + 1 + 1
    assert run("own", 6, 4)[1].traffic.trips == 6 + 1 + 1 + 1
