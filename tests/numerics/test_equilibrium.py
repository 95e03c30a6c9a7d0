"""Fixed points against the plain iteration, gradients against finite differences, the projection against KKT."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedtailor.errors import ConfigError, EquilibriumError
from fedtailor.numerics.equilibrium import (
    Equilibrium,
    fixed_point,
    rows_in_l1_ball,
)
from fedtailor.numerics.solve_log import Report, Solves, Tally, log_elsewhere, watched
from tests.helpers import F64

WIDTH, INPUTS, BATCH = 6, 3, 5
EXACT = Equilibrium(tolerance=1e-13, max_iterations=400)
PHIS: dict[str, Callable[[Tensor], Tensor]] = {"softplus": F.softplus, "tanh": torch.tanh, "relu": torch.relu}


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def dense(z: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
    return F.softplus(z @ b.mT + x @ c.mT)


def problem(norm: float = 0.8, batch: int = BATCH, seed: int = 0) -> tuple[Tensor, ...]:
    """B of infinity norm `norm`, C and x of `dense`. Of one sign, B contracts little more than its norm says."""
    b = draws(WIDTH, WIDTH, seed=seed).abs()
    return b * norm / b.abs().sum(1).max(), draws(WIDTH, INPUTS, seed=seed + 1), draws(batch, INPUTS, seed=seed + 2)


def at(tensors: tuple[Tensor, ...], how: Equilibrium, start: Tensor | None = None) -> tuple[Tensor, Report]:
    start = torch.zeros(len(tensors[2]), WIDTH, dtype=F64) if start is None else start
    return fixed_point(dense, start, tensors, how)


def plain(g: Callable[[Tensor], Tensor], z: Tensor, steps: int = 1000) -> Tensor:
    for _ in range(steps):
        z = g(z)
    return z


@pytest.mark.parametrize("beta", [1.0, 0.6])
@pytest.mark.parametrize("history", [0, 1, 5, 50])
@pytest.mark.parametrize("phi", PHIS)
def test_fixed_points_are_those_of_the_plain_iteration(phi: str, history: int, beta: float) -> None:
    b, c, x = problem(0.95)

    def g(z: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return PHIS[phi](z @ b.mT + x @ c.mT)

    start = draws(BATCH, WIDTH, seed=9)
    how = Equilibrium(tolerance=1e-9, max_iterations=1000, history=history, beta=beta)
    z, report = fixed_point(g, start, (b, c, x), how)
    assert bool(report.converged.all())
    torch.testing.assert_close(z, plain(lambda z: g(z, b, c, x), start), rtol=0, atol=1e-6)


def test_an_image_valued_fixed_point() -> None:
    weight, x = 0.05 * draws(4, 4, 3, 3), draws(BATCH, 4, 5, 6, seed=1)

    def g(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(F.conv2d(z, weight, padding=1) + x)

    z, report = fixed_point(g, torch.zeros_like(x), (weight, x), Equilibrium(tolerance=1e-9, max_iterations=100))
    assert bool(report.converged.all())
    torch.testing.assert_close(z, plain(lambda z: g(z, weight, x), x), rtol=0, atol=1e-6)


def test_acceleration_saves_iterations() -> None:
    tensors = problem(0.95)
    fast, slow = (at(tensors, replace(EXACT, tolerance=1e-8, history=m))[1].iterations for m in (5, 0))
    assert bool((fast < 0.7 * slow).all())


def test_the_report_is_of_each_sample() -> None:
    tensors, how = problem(), Equilibrium(tolerance=1e-6, max_iterations=100, history=0)
    _, report = at(tensors, how)
    z = torch.zeros(BATCH, WIDTH, dtype=F64)
    for step in range(1, int(report.iterations.max()) + 1):
        new = dense(z, *tensors)
        relative = (new - z).norm(dim=1) / new.norm(dim=1)
        here = report.iterations == step
        torch.testing.assert_close(report.residual[here], relative[here])
        assert bool((relative[report.iterations > step] > how.tolerance).all())
        z = new
    assert bool((report.residual <= how.tolerance).all())
    assert len(set(report.iterations.tolist())) > 1
    assert str(report).startswith("converged: largest residual ")


def test_a_sample_does_not_depend_on_the_others() -> None:
    b, c, x = problem(0.95)
    x = x * torch.tensor([0.01, 0.1, 1, 10, 100], dtype=F64)[:, None]
    how = Equilibrium(tolerance=1e-4)
    z, report = at((b, c, x), how)
    assert len(set(report.iterations.tolist())) > 1
    for i in range(BATCH):
        alone, own = at((b, c, x[i : i + 1]), how)
        assert int(own.iterations) == int(report.iterations[i])
        torch.testing.assert_close(alone[0], z[i], rtol=0, atol=1e-13)


def test_a_sample_that_has_converged_keeps_its_value() -> None:
    tensors = problem(0.95)
    solution, _ = at(tensors, EXACT)
    start = torch.zeros_like(solution)
    start[2] = solution[2] * (1 + 1e-5)
    z, report = at(tensors, Equilibrium(tolerance=1e-3), start)
    assert report.iterations[2] == 1
    assert int(report.iterations.max()) > 3
    # one evaluation found it good, one more is that of the gradient: no other sample's steps
    torch.testing.assert_close(z[2], plain(lambda z: dense(z, *tensors), start, 2)[2], rtol=0, atol=1e-14)


def test_nearer_starts_need_fewer_iterations() -> None:
    tensors = problem(0.95)
    solution, cold = at(tensors, replace(EXACT, tolerance=1e-6))
    moved = (tensors[0] * 0.999, *tensors[1:])
    warm = at(moved, replace(EXACT, tolerance=1e-6), solution)[1]
    assert float(warm.iterations.sum()) < 0.7 * float(cold.iterations.sum())


def jacobian(tensors: tuple[Tensor, ...], z: Tensor, sample: int) -> Tensor:
    b, c, x = tensors
    return torch.func.jacrev(lambda z: dense(z, b, c, x[sample]))(z[sample])


def cotangent_at_g(gradient: str, tensors: tuple[Tensor, ...]) -> Tensor:
    """What arrives at g when the cotangent of z is all ones, seen through a shift of g's output."""
    shift = torch.zeros(BATCH, WIDTH, dtype=F64, requires_grad=True)

    def g(z: Tensor, shift: Tensor, *rest: Tensor) -> Tensor:
        return dense(z, *rest) + shift

    z, _ = fixed_point(g, torch.zeros_like(shift), (shift, *tensors), replace(EXACT, gradient=gradient))
    return torch.autograd.grad(z.sum(), shift)[0]


@pytest.mark.parametrize(("gradient", "terms"), [("jfb", 1), ("neumann-1", 1), ("neumann-2", 2), ("neumann-7", 7)])
def test_terms_of_the_neumann_series(gradient: str, terms: int) -> None:
    tensors = problem()
    z, _ = at(tensors, EXACT)
    found = cotangent_at_g(gradient, tensors)
    for i in range(BATCH):
        j, ones = jacobian(tensors, z, i), torch.ones(WIDTH, dtype=F64)
        wanted = sum((torch.linalg.matrix_power(j.mT, k) @ ones for k in range(terms)), torch.zeros_like(ones))
        torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-10)


def test_implicit_solves_the_adjoint_equation() -> None:
    tensors = problem()
    z, _ = at(tensors, EXACT)
    found = cotangent_at_g("implicit", tensors)
    for i in range(BATCH):
        system = torch.eye(WIDTH, dtype=F64) - jacobian(tensors, z, i).mT
        torch.testing.assert_close(
            found[i], torch.linalg.solve(system, torch.ones(WIDTH, dtype=F64)), rtol=0, atol=1e-10
        )


def test_more_terms_come_nearer_to_the_implicit_gradient() -> None:
    tensors = problem()
    exact = cotangent_at_g("implicit", tensors)
    apart = [float((cotangent_at_g(f"neumann-{k}", tensors) - exact).norm()) for k in (1, 2, 4, 8, 16, 128)]
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 1e-10


def test_the_implicit_gradient_is_that_of_finite_differences() -> None:
    tensors = tuple(v.requires_grad_() for v in problem(batch=3))
    how = replace(EXACT, gradient="implicit")
    assert torch.autograd.gradcheck(lambda *t: at(t, how)[0], tensors)


def test_the_implicit_gradient_has_a_gradient() -> None:
    tensors = tuple(v.requires_grad_() for v in problem(batch=2))
    how = replace(EXACT, gradient="implicit")
    assert torch.autograd.gradgradcheck(lambda *t: at(t, how)[0].square(), tensors, fast_mode=True)


@pytest.mark.parametrize("gradient", ["jfb", "neumann-3", "implicit"])
def test_a_stack_is_a_loop(gradient: str) -> None:
    how = Equilibrium(tolerance=1e-5, max_iterations=100, gradient=gradient)
    c = problem()[1]
    b, x = (torch.stack([problem(0.2 + 0.3 * i, seed=i)[part] for i in range(3)]) for part in (0, 2))

    def loss(b: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, Report]:
        z, report = at((b, c, x), how)
        return z.square().sum(), report

    grad = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)
    found, report = torch.func.vmap(grad, in_dims=(0, None, 0))(b, c, x)
    leaf = b.clone().requires_grad_()
    total = torch.func.vmap(loss, in_dims=(0, None, 0))(leaf, c, x)[0].sum()
    torch.testing.assert_close(torch.autograd.grad(total, leaf)[0], found[0], rtol=0, atol=1e-13)
    for i in range(3):
        alone, own = grad(b[i], c, x[i])
        assert torch.equal(own.iterations, report.iterations[i])
        for mine, others in zip(alone, found, strict=True):
            torch.testing.assert_close(mine, others[i], rtol=4e-15, atol=1e-13)


def saved_bytes(gradient: str, iterations: int) -> int:
    """Of all that the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}
    # with tiny plain steps, which spend the budget
    how = Equilibrium(tolerance=1e-12, max_iterations=iterations, history=0, beta=0.1, gradient=gradient)
    tensors = tuple(v.requires_grad_() for v in problem())

    def pack(v: Tensor) -> Tensor:
        kept[v.data_ptr()] = v.numel() * v.element_size()
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        z, report = at(tensors, how)
    assert bool((report.iterations == iterations).all())
    assert z.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("gradient", ["jfb", "neumann-3", "implicit"])
def test_memory_does_not_grow_with_iterations(gradient: str) -> None:
    assert saved_bytes(gradient, 8) == saved_bytes(gradient, 64) > 0


def test_what_does_not_converge_is_reported_and_is_the_last_iterate() -> None:
    tensors = problem(norm=3.0)
    how = Equilibrium(tolerance=1e-6, max_iterations=7, history=0)
    z, report = at(tensors, how)
    assert not bool(report.converged.any())
    assert bool((report.iterations == 7).all())
    assert str(report).startswith(f"{BATCH} of {BATCH} samples not converged: largest residual ")
    torch.testing.assert_close(z, plain(lambda z: dense(z, *tensors), torch.zeros(BATCH, WIDTH, dtype=F64), 8))


def test_a_sample_that_is_not_a_number_stops_and_harms_no_other() -> None:
    b, c, x = problem()
    wanted, _ = at((b, c, x), EXACT)
    x[1, 0] = torch.nan
    z, report = at((b, c, x), EXACT)
    others = [0, 2, 3, 4]
    torch.testing.assert_close(z[others], wanted[others], rtol=0, atol=1e-12)
    assert report.iterations[1] == 1
    assert report.converged.tolist() == [True, False, True, True, True]
    with pytest.raises(EquilibriumError, match=r"\b1\b.*\b5\b"):
        at((b, c, x), replace(EXACT, strict=True))
    with pytest.raises(EquilibriumError, match=r"of 1 of 10 samples"):  # stacked as well
        torch.func.vmap(lambda x: at((b, c, x), replace(EXACT, strict=True))[0])(torch.stack([x, x.nan_to_num()]))


def test_an_exploding_map_is_not_finite() -> None:
    with pytest.raises(EquilibriumError, match=r"local\.lr.*model\.project"):
        at(problem(norm=1e30), Equilibrium(history=0, max_iterations=30, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_iterations": 0}, EquilibriumError, r"max_iterations = 0: an equilibrium needs at least 1"),
        ({"tolerance": 0.0}, ConfigError, r"tolerance = 0\.0: must be above 0"),
        ({"tolerance": float("nan")}, ConfigError, r"tolerance = nan: must be above 0"),
        ({"beta": 0.0}, ConfigError, r"beta = 0\.0: must be above 0 and at most 1"),
        ({"history": -1}, ConfigError, r"history = -1: must be 0 \(plain iteration\) or more"),
        ({"gradient": "jbf"}, ConfigError, r'gradient = "jbf": must be "jfb", "neumann-k" \(k = 1, 2, \.\.\.\)'),
        ({"gradient": "neumann-0"}, ConfigError, r'gradient = "neumann-0": must be'),
        ({"gradient": "neumann"}, ConfigError, r'gradient = "neumann": must be'),
    ],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Equilibrium(**options)


def test_watchers_see_every_solve() -> None:
    with watched() as outer:
        at(problem(), EXACT)
        with watched() as inner:
            z, _ = at(tuple(v.requires_grad_() for v in problem()), replace(EXACT, gradient="implicit"))
            z.sum().backward()
    at(problem(), EXACT)
    assert (len(outer), len(inner)) == (3, 2)  # forward, and the adjoint on the way back
    assert all(bool(report.converged.all()) for report in outer)


@given(st.integers(0, 10_000), st.integers(1, 7), st.floats(0.1, 5), st.floats(0.05, 0.99))
def test_the_projection_is_the_nearest_point(seed: int, columns: int, size: float, radius: float) -> None:
    rows = size * draws(4, columns, seed=seed)
    rows[0, 0] = 0
    found = rows_in_l1_ball(rows, radius)
    for row, near in zip(rows, found, strict=True):
        if float(row.abs().sum()) <= radius:
            assert torch.equal(row, near)
            continue
        assert float(near.abs().sum()) == pytest.approx(radius, abs=1e-12)
        # the distance's slope is the same for all that stay, and not larger for those at 0 (KKT conditions)
        stays = near != 0
        moves = (row - near) * torch.where(stays, near.sign(), row.sign())
        shift = float(moves[stays].mean())
        torch.testing.assert_close(moves[stays], torch.full_like(moves[stays], shift), rtol=0, atol=1e-12)
        assert shift >= 0
        assert bool((row[~stays].abs() <= shift + 1e-12).all())


def test_the_projection_in_numbers() -> None:
    rows = torch.tensor([[3.0, -1.0, 0.5], [0.2, 0.2, -0.2], [2.0, 2.0, -2.0], [0.0, 0.0, 0.0]], dtype=F64)
    wanted = torch.tensor([[0.9, 0, 0], [0.2, 0.2, -0.2], [0.3, 0.3, -0.3], [0, 0, 0]], dtype=F64)
    torch.testing.assert_close(rows_in_l1_ball(rows, 0.9), wanted, rtol=0, atol=1e-15)
    torch.testing.assert_close(rows_in_l1_ball(wanted, 0.9), wanted, rtol=0, atol=1e-15)


def test_the_projection_has_a_derivative_and_stacks() -> None:
    stack = draws(3, 4, 5)
    stack[0, 1] *= 0.01  # inside the ball
    assert torch.autograd.gradcheck(lambda v: rows_in_l1_ball(v, 0.9), stack[0].clone().requires_grad_())
    together = torch.func.vmap(torch.func.jacrev(lambda v: rows_in_l1_ball(v, 0.9)), in_dims=1)(stack.movedim(0, 1))
    for i in range(3):
        assert torch.equal(together[i], torch.func.jacrev(lambda v: rows_in_l1_ball(v, 0.9))(stack[i]))


@pytest.mark.parametrize("phi", PHIS)
def test_a_projected_map_contracts(phi: str) -> None:
    b, y, z = rows_in_l1_ball(10 * draws(8, 8), 0.9), 5 * draws(50, 8, seed=1), 5 * draws(50, 8, seed=2)
    assert float(torch.linalg.matrix_norm(b, torch.inf)) <= 0.9 + 1e-12
    apart = (PHIS[phi](y @ b.mT) - PHIS[phi](z @ b.mT)).abs().amax(1)
    assert bool((apart <= 0.9 * (y - z).abs().amax(1) + 1e-12).all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("gradient", "theirs"), [("implicit", {"ift": True}), ("jfb", {"grad": 1}), ("neumann-4", {"grad": 4})]
)
def test_torchdeq_agrees(gradient: str, theirs: dict[str, Any]) -> None:
    torchdeq = pytest.importorskip("torchdeq")
    tensors = tuple(v.requires_grad_() for v in problem())
    ours, _ = at(tensors, replace(EXACT, gradient=gradient))
    deq = torchdeq.get_deq(
        f_solver="anderson",
        b_solver="anderson",
        f_max_iter=400,
        b_max_iter=400,
        f_tol=1e-12,
        b_tol=1e-12,
        f_stop_mode="rel",
        b_stop_mode="rel",
        **theirs,
    )
    (other,), _ = deq(lambda z: dense(z, *tensors), torch.zeros(BATCH, WIDTH, dtype=F64))
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-9)
    found, wanted = (torch.autograd.grad(z.square().sum(), tensors) for z in (ours, other))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)


def test_a_tally_counts_samples_that_did_not_converge() -> None:
    fine = Report(torch.tensor([1e-4, 2e-4]), torch.tensor([3, 5]), torch.tensor([True, True]))
    open_ = Report(torch.tensor([[0.5]]), torch.tensor([[30]]), torch.tensor([[False]]))
    assert Solves().tally.figures == {}
    wanted = {"solver_open": 1.0, "solver_iterations": pytest.approx(38 / 3), "solver_residual": 0.5}
    assert Solves([fine, open_]).tally.figures == wanted
    with watched() as outer, watched() as inner:
        inner.append(fine)
        log_elsewhere(Solves([open_]).tally)
    assert inner.tally.figures == wanted
    assert outer.tally.figures["solver_iterations"] == 30
    lost = Tally(1, 1, 30, float("nan"))
    assert math.isnan((lost + outer.tally).residual)
    assert math.isnan((outer.tally + lost).residual)
