"""Linear mixed models from sums over sites: the profiled deviance of lme4 and its gradient.

y_i ~ N(X_i v_i, noise), v_i = beta + L z_i, z_i ~ N(0, noise I). Given the factor L, beta and noise have closed forms,
so the deviance is a function of L alone: Bates, Maechler, Bolker, Walker, J. Stat. Softw. 67, 2015, section 3.4. Here
its terms are sums over sites of matrices of the size of X'X; nothing else of a site is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.numerics.eigen import eigen

Floats = NDArray[np.float64]
Entries = tuple[NDArray[np.intp], NDArray[np.intp]]  # rows and columns of L
STRUCTURES = ("none", "intercept", "diagonal", "full")
START, SMALL, STEPS, RESTARTS = 0.3, 0.03, 100, 4
RANK = 1e-11  # eigenvalues below this part of the largest are those of columns that repeat others


class Marginal(NamedTuple):
    """Of one site, or summed: X'V^-1 X, X'V^-1 y, y'V^-1 y and log|V|, with V = I + X L L' X'; and the numbers in y."""

    a: Tensor  # [k, k]
    b: Tensor  # [k, outputs]
    c: Tensor
    logdet: Tensor
    numbers: Tensor


def posterior(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """L (I + L'AL)^-1 L', by which v - beta answers to X'(y - X beta); and log|I + L'AL|."""
    half, logdet = _half_posterior(a, factor)
    return half.mT @ half, logdet


def _half_posterior(a: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """H with H'H as in `posterior`, a row for every column of the factor."""
    inner = factor.mT @ a @ factor + torch.eye(factor.shape[-1], dtype=a.dtype, device=a.device)
    root = torch.linalg.cholesky(inner)
    half = torch.linalg.solve_triangular(root, factor.mT, upper=False)
    return half, 2 * torch.diagonal(root, dim1=-2, dim2=-1).log().sum(-1)


def _used(factor: Tensor) -> Tensor:
    """The columns that are not 0: of a random intercept there is one, and the work of a site grows with them."""
    used = factor.any(0)
    return factor if bool(used.all()) else factor[:, used]


def own_covariance(a: Tensor, factor: Tensor, covariance: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor]:
    """Of a site's own coefficients given all data, Var(v - v_hat); and dv/dbeta, how much of each is the common one.

    `covariance` is that of beta. Henderson, Biometrics 31, 1975; that the factor is estimated too is left out.
    """
    cov, _ = posterior(a, factor)
    kept = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) - cov @ a
    return noise * cov + kept @ covariance @ kept.mT, torch.diagonal(kept, dim1=-2, dim2=-1)


def marginal(a: Tensor, b: Tensor, c: Tensor, count: Tensor, factor: Tensor) -> Marginal:
    """What a site adds to the deviance, from A = X'X, b = X'y and c = y'y."""
    half, logdet = _half_posterior(a, _used(factor))
    explained, shrunk = half @ a, half @ b
    rest = c - shrunk.square().sum()
    return Marginal(a - explained.mT @ explained, b - explained.mT @ shrunk, rest, logdet * b.shape[-1], count)


def slope(a: Tensor, b: Tensor, factor: Tensor, beta: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """What a site adds to the gradient at `beta`; `inverse` is that of the summed X'V^-1 X."""
    half, _ = _half_posterior(a, _used(factor))
    explained, rest = half @ a, b - a @ beta
    w = rest - explained.mT @ (half @ rest)
    m = a - explained.mT @ explained
    return w @ w.mT, m @ inverse @ m


@dataclass(frozen=True)
class Fitted:
    factor: Tensor
    beta: Tensor
    noise: Tensor
    covariance: Tensor  # of beta
    deviance: float
    parameters: int  # of the factor
    exchanges: int


@dataclass(frozen=True)
class Problem:
    """Two sums over sites, and how the rest is settled."""

    sums: Callable[[Tensor], Marginal]
    slopes: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    penalty: Tensor  # [k], of beta
    reml: bool = True
    noise: float | None = None  # known, where y is a working response
    widest: float | None = None  # entry of L; where a class is rare, quasi-likelihood has no maximum without a bound

    def solved(self, total: Marginal) -> tuple[float, Tensor, Tensor, Tensor, float]:
        """Deviance, beta, noise, the inverse of X'V^-1 X, and by how much beta lowers the degrees of freedom."""
        s, q = eigen(total.a + torch.diag(self.penalty))
        seen = s > s[-1].clamp(min=torch.finfo(s.dtype).tiny) * max(RANK, 8 * len(s) * torch.finfo(s.dtype).eps)
        inverse = (q[:, seen] / s[seen]) @ q[:, seen].mT
        beta = inverse @ total.b
        rest = total.c - (total.b * beta).sum()
        if self.noise is None:  # of a working response c lacks a constant
            rest = rest.clamp(min=torch.finfo(s.dtype).tiny)
        outputs = total.b.shape[-1]
        lost = float(seen.sum()) * outputs if self.reml else 0.0
        freedom = max(float(total.numbers) - lost, 1.0)
        tiny = 1e-12 * total.c.abs() / total.numbers.clamp(min=1) + torch.finfo(s.dtype).tiny
        noise = (rest / freedom).clamp(min=tiny) if self.noise is None else rest.new_tensor(self.noise)
        deviance = float(total.logdet) + float(rest / noise) + freedom * float(noise.log())
        if self.reml:
            deviance += outputs * float(s[seen].log().sum())
        return deviance, beta, noise, inverse, freedom

    def at(self, factor: Tensor) -> tuple[float, Tensor]:
        """Deviance, and its gradient by the covariance L L'."""
        total = self.sums(factor)
        deviance, beta, noise, inverse, _ = self.solved(total)
        squares, lost = self.slopes(factor, beta, inverse)
        outputs = total.b.shape[-1]
        return deviance, outputs * total.a - squares / noise - (outputs * lost if self.reml else 0.0)


def positions(structure: str, varies: NDArray[np.bool_], is_intercept: NDArray[np.bool_]) -> Entries:
    """Rows and columns of the entries of L that are free."""
    chosen = np.flatnonzero(varies & is_intercept if structure == "intercept" else varies)
    if structure == "none":
        chosen = chosen[:0]
    if structure != "full":
        return chosen, chosen
    rows, columns = np.tril_indices(len(chosen))
    return chosen[rows], chosen[columns]


def limits(at: Entries, widest: float | None) -> list[tuple[float | None, float | None]]:
    """Between which each free entry of L lies; one of the diagonal is not negative."""
    lowest = None if widest is None else -widest
    return [(0.0 if row == column else lowest, widest) for row, column in zip(*at, strict=True)]


def fit(problem: Problem, at: Entries, start: Tensor, steps: int = STEPS, restarts: int = RESTARTS) -> Fitted:
    """Minimise the deviance over the free entries of L, from `start`, by L-BFGS; a diagonal entry is not negative.

    With fewer than the usual steps it is one of many fits, each begun where the one before ended, and less exact.
    """
    rows, columns = (torch.from_numpy(np.ascontiguousarray(v)).to(start.device) for v in at)
    exchanges = 0

    def factor_of(theta: Floats) -> Tensor:
        factor = torch.zeros_like(start)
        factor[rows, columns] = torch.from_numpy(np.ascontiguousarray(theta)).to(start)
        return factor

    first = problem.sums(factor_of(np.zeros(len(rows))))
    scale = 1 / max(float(first.numbers), 1.0)

    def objective(theta: Floats) -> tuple[float, Floats]:
        nonlocal exchanges
        exchanges += 2
        factor = factor_of(theta)
        deviance, by_covariance = problem.at(factor)
        return scale * deviance, 2 * scale * (by_covariance @ factor)[rows, columns].double().cpu().numpy()

    theta = start[rows, columns].double().cpu().numpy().copy()
    first_step = 0.0 if start.any() else START  # what was 0 is looked at again below
    if len(theta):
        is_diagonal = at[0] == at[1]
        theta = np.where(is_diagonal & (theta <= 0), first_step, theta)
        bounds = limits(at, problem.widest)
        close = 1.0 if steps >= STEPS else 1e3
        options = {"maxiter": steps, "ftol": 1e-13 * close**2, "gtol": 1e-8 * close}
        for _ in range(restarts):
            theta = minimize(objective, theta, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
            # at L = 0 the gradient by L is 0 whatever the one by the variance is: a long step may have gone there
            by_covariance = problem.at(factor_of(theta))[1][rows, columns].double().cpu().numpy()
            exchanges += 2
            stuck = is_diagonal & (theta < 1e-3) & (scale * by_covariance < -1e-9)
            if not stuck.any():
                break
            theta = np.where(stuck, SMALL, theta)
    factor = factor_of(theta)
    deviance, beta, noise, inverse, _ = problem.solved(problem.sums(factor))
    return Fitted(factor, beta, noise, noise * inverse, deviance, len(theta), exchanges + 2)


def best(problem: Problem, structures: list[Entries], start: Tensor, sites: int) -> Fitted:
    """The structure with the least Schwarz criterion, from simple to rich, each begun where the one before ended."""
    best_fit: Fitted | None = None
    for at in structures:
        tried = fit(problem, at, start if best_fit is None else best_fit.factor)
        if best_fit is None or _evidence(tried, sites) < _evidence(best_fit, sites):
            best_fit = tried
    assert best_fit is not None
    return best_fit


def _evidence(fitted: Fitted, sites: int) -> float:
    return fitted.deviance + fitted.parameters * float(np.log(max(sites, 2)))
