"""Linear models of many sites from the cross products of each, stacked: nothing here needs a row.

The last column of every site is that of ones. The mixed model is that of reml.py; the own model of a site is ridge with
the penalty of the least generalised cross-validation: Golub, Heath, Wahba, Technometrics 21, 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.numerics import reml

Floats = NDArray[np.float64]
PENALTIES = (1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 1e5)
MOST_TOGETHER = 8  # random coefficients that may have covariances
STEP, FLATTEST = 1e-4, 1e-4  # of the factor; curvature, below which it is not believed
STEPS = 30
ROUNDING = 1e-10  # of squares, that are left of a response that is explained exactly


@dataclass(frozen=True)
class SiteSums:
    """A = X'X, b = X'y, c = y'y and the rows of every site."""

    a: Tensor  # [sites, k, k]
    b: Tensor  # [sites, k]
    c: Tensor  # [sites]
    n: Tensor  # [sites]

    def only(self, sites: Sequence[int]) -> SiteSums:
        at = torch.as_tensor(list(sites), dtype=torch.int64, device=self.n.device)
        return SiteSums(self.a[at], self.b[at], self.c[at], self.n[at])

    def without(self, site: int) -> SiteSums:
        return self.only([i for i in range(len(self.n)) if i != site])


@dataclass(frozen=True)
class SharedFit:
    """The mixed model of some sites."""

    at: reml.Entries  # of the factor, that its structure has
    factor: Tensor  # relative to the noise
    beta: Tensor  # [k]
    noise: Tensor
    covariance: Tensor  # of beta
    curvature: Floats = field(default_factory=lambda: np.zeros((0, 0)), repr=False)  # inverse, of the deviance per row

    @property
    def free(self) -> reml.Entries:
        """The entries of the factor that are not 0."""
        used = (self.factor[self.at[0], self.at[1]] != 0).numpy()
        return self.at[0][used], self.at[1][used]

    @property
    def theta(self) -> Floats:
        return self.factor[self.free[0], self.free[1]].numpy()

    def models(self, sums: SiteSums) -> tuple[Tensor, Tensor]:
        """Coefficients of every site given its sums, and their covariance; a site may be new."""
        answer, _ = reml.posterior(sums.a, self.factor)
        rest = sums.b - sums.a @ self.beta
        kept = torch.eye(len(self.beta), dtype=answer.dtype, device=answer.device) - answer @ sums.a
        mean = self.beta + (answer @ rest[:, :, None])[:, :, 0]
        return mean, self.noise * answer + kept @ self.covariance @ kept.mT


def _problem(sums: SiteSums) -> reml.Problem:
    """As reml.marginal and reml.slope of every site, summed, with one factorisation for both."""
    total, k = sums.a.sum(0), sums.a.shape[-1]
    last: dict[str, Tensor] = {}

    def marginal(factor: Tensor) -> reml.Marginal:
        used = factor[:, factor.any(0)]
        inner = used.mT @ sums.a @ used + torch.eye(used.shape[1], dtype=used.dtype, device=used.device)
        root = torch.linalg.cholesky(inner)
        half = torch.linalg.solve_triangular(root, used.mT, upper=False)
        explained, shrunk = half @ sums.a, (half @ sums.b[:, :, None])[:, :, 0]
        last.update(factor=factor, half=half, explained=explained)
        flat = explained.reshape(-1, k)
        logdet = 2 * torch.diagonal(root, dim1=-2, dim2=-1).log().sum()
        b = sums.b.sum(0) - flat.mT @ shrunk.reshape(-1)
        return reml.Marginal(total - flat.mT @ flat, b[:, None], sums.c.sum() - shrunk.square().sum(), logdet, rows)

    def slope(factor: Tensor, beta: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        assert last["factor"] is factor
        half, explained = last["half"], last["explained"]
        rest = sums.b - sums.a @ beta[:, 0]
        w = rest - (explained.mT @ (half @ rest[:, :, None]))[:, :, 0]
        m = sums.a - explained.mT @ explained
        return w.mT @ w, m.reshape(-1, k).mT @ (inverse @ m).reshape(-1, k)

    rows = sums.n.sum()
    return reml.Problem(sums=marginal, slopes=slope, penalty=torch.zeros_like(sums.b[0]))


def _as_shared(at: reml.Entries, found: reml.Fitted) -> SharedFit:
    return SharedFit(at, found.factor, found.beta[:, 0], found.noise, found.covariance)


def _objective(problem: reml.Problem, at: reml.Entries, like: Tensor) -> Callable[[Floats], tuple[float, Floats]]:
    """The deviance per row by the free entries, with its gradient."""

    def objective(theta: Floats) -> tuple[float, Floats]:
        factor = torch.zeros_like(like)
        factor[at[0], at[1]] = torch.from_numpy(np.ascontiguousarray(theta))
        value, by_covariance = problem.at(factor)
        return value / rows, 2 / rows * (by_covariance @ factor)[at[0], at[1]].numpy()

    rows = max(float(problem.sums(torch.zeros_like(like)).numbers), 1.0)
    return objective


def fit_shared(sums: SiteSums) -> SharedFit:
    """The mixed model by REML, with the structure of the least Schwarz criterion."""
    problem, start = _problem(sums), torch.zeros_like(sums.a[0])
    within = within_squares(sums).sum(0)
    varies = (torch.diagonal(within) > 1e-9 * torch.diagonal(sums.a.sum(0))).numpy()
    is_intercept = np.arange(len(varies)) == len(varies) - 1
    varies = varies | is_intercept
    names = [name for name in reml.STRUCTURES if name != "full" or varies.sum() <= MOST_TOGETHER]
    structures = [reml.positions(name, varies, is_intercept) for name in names]
    found = reml.best(problem, structures, start, len(sums.n))
    at = next(e for e in structures if len(e[0]) == found.parameters)
    return _with_curvature(sums, _as_shared(at, found))


def _with_curvature(sums: SiteSums, shared: SharedFit) -> SharedFit:
    """The inverse of the second derivatives, by differences of the gradient; refits begin with it."""
    objective, theta = _objective(_problem(sums), shared.free, shared.factor), shared.theta
    steps = STEP * np.eye(len(theta))
    hessian = [(objective(theta + step)[1] - objective(theta - step)[1]) / (2 * STEP) for step in steps]
    if not hessian:
        return shared
    values, vectors = np.linalg.eigh((np.stack(hessian) + np.stack(hessian).T) / 2)
    half = vectors / np.sqrt(np.maximum(values, FLATTEST * values.max()))
    inverse = half @ half.T
    return replace(shared, curvature=(inverse + inverse.T) / 2)


def _settle(
    objective: Callable[[Floats], tuple[float, Floats]], theta: Floats, curvature: Floats, close: float
) -> Floats:
    """Newton steps with the second derivatives of a fit nearby; where these do not lead on, BFGS."""
    slope = objective(theta)[1]
    for _ in range(STEPS):
        if np.abs(slope).max() < close:
            return theta
        tried = theta - curvature @ slope
        steeper = objective(tried)[1]
        if not np.abs(steeper).max() < 0.7 * np.abs(slope).max():
            break
        theta, slope = tried, steeper
    options = {"gtol": close, "hess_inv0": curvature, "maxiter": 200}
    found: Floats = minimize(objective, theta, jac=True, method="BFGS", options=options).x
    return found


def refit(sums: SiteSums, before: SharedFit, *, is_draft: bool = False) -> SharedFit:
    """The mixed model of other sums with the structure of an earlier one, from where that ended.

    The deviance does not know the sign of a column of the factor, so no entry needs a bound.

    is_draft: less exactly, and variances that were 0 before stay 0, as is enough for one of many draws.
    """
    problem, theta, free = _problem(sums), before.theta, before.free
    if len(theta):
        theta = _settle(_objective(problem, free, before.factor), theta, before.curvature, 1e-5 if is_draft else 1e-9)
    factor = torch.zeros_like(before.factor)
    factor[free[0], free[1]] = torch.from_numpy(np.ascontiguousarray(theta))
    if not is_draft and len(theta) < len(before.at[0]):
        by_covariance = torch.diagonal(problem.at(factor)[1])[torch.diagonal(factor) == 0]
        if bool((by_covariance < -1e-9 * float(sums.n.sum())).any()):
            found = reml.fit(problem, before.at, factor.tril() * torch.sign(torch.diagonal(factor)))
            return _as_shared(before.at, found)
    _, beta, noise, inverse, _ = problem.solved(problem.sums(factor))
    return replace(before, factor=factor, beta=beta[:, 0], noise=noise, covariance=noise * inverse)


def with_coefficients(sums: SiteSums, shared: SharedFit) -> SharedFit:
    """Common coefficients by generalised least squares, given the variances."""
    problem = _problem(sums)
    _, beta, _, inverse, _ = problem.solved(problem.sums(shared.factor))
    return replace(shared, beta=beta[:, 0], covariance=shared.noise * inverse)


def within_squares(sums: SiteSums) -> Tensor:
    """Squares and products of columns around the means of each site."""
    total = sums.a[:, :, -1]
    return sums.a - total[:, :, None] * total[:, None, :] / sums.n.clamp(min=1)[:, None, None]


def moments_of_new_rows(sums: SiteSums, pooled: Tensor) -> Tensor:
    """E[x x'] of new rows of a site: its means, and its covariance, shrunk to that within all sites by k rows."""
    k = sums.a.shape[-1]
    means = sums.a[:, :, -1] / sums.n.clamp(min=1)[:, None]
    within = (within_squares(sums) + k * pooled) / (sums.n + k)[:, None, None]
    return within + means[:, :, None] * means[:, None, :]


def pooled_within(sums: SiteSums) -> Tensor:
    freedom = (sums.n - 1).clamp(min=0).sum().clamp(min=1)
    return within_squares(sums).sum(0) / freedom


def explains_exactly(sums: SiteSums) -> bool:
    """Whether one linear model of all sites leaves nothing but rounding."""
    a, b, c = sums.a.sum(0), sums.b.sum(0), sums.c.sum()
    rest = c - b @ torch.linalg.pinv(a, hermitian=True) @ b
    return bool(rest < ROUNDING * (c - b[-1].square() / sums.n.sum()))


def own_models(sums: SiteSums) -> Tensor:
    """Ridge of every site by itself; the intercept is not penalised."""
    n = sums.n.clamp(min=1)[:, None]
    center, level = sums.a[:, :-1, -1] / n, sums.b[:, -1:] / n
    square = within_squares(sums)[:, :-1, :-1]
    product = sums.b[:, :-1] - n * center * level
    total = (sums.c - n[:, 0] * level[:, 0].square()).clamp(min=0)
    s, q = torch.linalg.eigh(square)
    s = s.clamp(min=0)
    turned = (q.mT @ product[:, :, None])[:, :, 0]
    penalty = s.new_tensor(PENALTIES)[:, None, None]
    v = turned / (s + penalty)  # [penalties, sites, k - 1]
    rest = (total - 2 * (v * turned).sum(-1) + (v.square() * s).sum(-1)).clamp(min=0)
    freedom = n[:, 0] - 1 - (s / (s + penalty)).sum(-1)
    errors = torch.where(freedom > 0.01 * n[:, 0], rest / freedom.clamp(min=1e-12).square(), torch.inf)
    best = errors.argmin(0)  # the strongest penalty where none has freedom
    best = torch.where(torch.isfinite(errors).any(0), best, len(PENALTIES) - 1)
    slopes = (q @ v[best, torch.arange(len(best), device=best.device)][:, :, None])[:, :, 0]
    return torch.cat([slopes, level - (center * slopes).sum(1, keepdim=True)], dim=1)


def simulate(sums: SiteSums, shared: SharedFit, draw: torch.Generator) -> SiteSums:
    """Sums that the model could have given to the same columns."""
    sites, k = sums.b.shape
    v = (
        shared.beta
        + torch.randn((sites, k), generator=draw, dtype=sums.b.dtype, device=draw.device)
        @ shared.factor.mT
        * shared.noise.sqrt()
    )
    s, q = torch.linalg.eigh(sums.a)
    s = torch.where(s > 1e-10 * s[:, -1:], s, 0)
    z = torch.randn((sites, k), generator=draw, dtype=sums.b.dtype, device=draw.device)
    seen = (z * (s > 0)).square().sum(1)
    error = shared.noise.sqrt() * (q @ (s.sqrt() * z)[:, :, None])[:, :, 0]  # X'e
    freedom = (sums.n - (s > 0).sum(1)).clamp(min=0)
    beyond = torch._standard_gamma(freedom.clamp(min=1e-3) / 2, draw) * 2 * (freedom > 0)
    fitted = (sums.a @ v[:, :, None])[:, :, 0]
    c = (v * fitted).sum(1) + 2 * (v * error).sum(1) + shared.noise * (seen + beyond)
    return replace(sums, b=fitted + error, c=c)
