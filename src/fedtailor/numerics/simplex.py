"""The least quadratic form over weights that are not negative and add up to 1."""

from __future__ import annotations

import torch
from torch import Tensor


def least_on_simplex(q: Tensor, tolerance: float = 1e-12) -> Tensor:
    """The a with a >= 0 and sum(a) = 1 that has the least a' q a, for q symmetric and without negative eigenvalues.

    By active sets: weights are let in one at a time, where that lowers the form most, and leave when they reach 0. It
    ends after finitely many exact steps, so that zeros are zeros and no step size or number of iterations matters.
    """
    given, q = q, q.cpu()  # many steps on few numbers
    size, scale = len(q), q.abs().max().clamp(min=torch.finfo(q.dtype).tiny)
    q = q.double() / scale
    a = q.new_zeros(size)
    free = torch.zeros_like(a, dtype=torch.bool)
    first = int(q.diagonal().argmin())
    a[first], free[first] = 1.0, True
    for _ in range(10 * size):  # a bound that is not reached: each set of free weights comes at most once
        while True:
            best = _least_of(q, free)
            if (best[free] > 0).all():
                a = best
                break
            short = free & (best <= 0)
            way = (a[short] - best[short]).clamp(min=torch.finfo(q.dtype).tiny)
            step = (a[short] / way).min()  # to where the first weight reaches 0
            a = a + step * (best - a)
            free &= a > tolerance
            a = torch.where(free, a, 0)
        slope = q @ a
        gain = torch.where(free, 0, a @ slope - slope)  # how much faster than now the form falls with a weight let in
        if gain.max() <= tolerance:
            break
        free[gain.argmax()] = True
    return (a / a.sum()).to(given)


def _least_of(q: Tensor, free: Tensor) -> Tensor:
    """The least form with sum(a) = 1 over the free weights, of any sign; among equals the shortest."""
    at = free.nonzero()[:, 0]
    n = len(at)
    system = q.new_zeros(n + 1, n + 1)  # q a = lam 1, 1'a = 1
    system[:n, :n] = q[at][:, at]
    system[:n, n], system[n, :n] = -1.0, 1.0
    right = q.new_zeros(n + 1, 1)
    right[n] = 1.0
    a = q.new_zeros(len(q))
    a[at] = torch.linalg.lstsq(system, right, driver="gelsd").solution[:n, 0]
    return a
