"""Estimates, tests and intervals of a model, in the units of the data, from what its program has left at the server.

Degrees of freedom by Satterthwaite as lmerTest has them: Kuznetsova, Brockhoff, Christensen, J. Stat. Softw. 82, 2017.
R2 by Nakagawa, Schielzeth, Methods Ecol. Evol. 4, 2013, with random slopes by Johnson, Methods Ecol. Evol. 5, 2014.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.algorithms._programs.profile_intervals import targets
from fedtailor.core.trees import Tree
from fedtailor.data.tabular.formula import Design
from fedtailor.numerics import forward_mode, profiled_deviance
from fedtailor.numerics.cross_products import factor_of, lower_entries

Floats = NDArray[np.float64]
ZERO_SD = 1e-10  # of a standard deviation, in parts of the residual one: it is 0
TINY_SD = 1e-4  # a standard deviation below this part of the residual one is on the boundary
INFORMATION = 1e-6  # of a coefficient, per row in units of its column: with less it has no finite estimate
LOGISTIC = math.pi**2 / 3  # variance of the logistic distribution


@dataclass(frozen=True)
class Coefficient:
    term: str
    estimate: float
    error: float
    df: float | None  # None: a normal distribution
    statistic: float
    p: float
    low: float
    high: float


@dataclass(frozen=True)
class RandomPart:
    """A standard deviation or a correlation of random effects; of the residual if the group is empty."""

    group: str
    term: str
    kind: Literal["sd", "correlation"]
    estimate: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Mode:
    """The conditional mode of a random effect at a site, with its standard deviation."""

    site: str
    term: str
    estimate: float
    error: float
    low: float
    high: float
    coefficient: float  # with the fixed effect of the same name
    shrinkage: float  # 0: by the site's rows alone; 1: these say nothing


@dataclass(frozen=True)
class Estimates:
    formula: str
    family: str
    method: str
    coefficients: tuple[Coefficient, ...]
    random: tuple[RandomPart, ...]
    dropped: tuple[str, ...]  # columns that repeat others
    loglik: float
    parameters: int
    rows: int
    groups: dict[str, int]
    events: int | None = None
    null_loglik: float | None = None
    sigma: float | None = None
    icc: float | None = None
    r2_marginal: float | None = None
    r2_conditional: float | None = None
    is_singular: bool = False
    diverging: tuple[str, ...] = ()
    is_settled: bool = True
    level: float = 0.95
    notes: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ()
    covariance: Floats = field(default_factory=lambda: np.zeros((0, 0)), repr=False)

    @property
    def deviance(self) -> float:
        """Minus twice the log-likelihood; the REML criterion where restricted."""
        return -2 * self.loglik

    @property
    def aic(self) -> float:
        return self.deviance + 2 * self.parameters

    @property
    def bic(self) -> float:
        """By rows; by events of a Cox model."""
        return self.deviance + math.log(self.rows if self.events is None else self.events) * self.parameters


@dataclass(frozen=True)
class Scaled:
    """From the units that sites agreed on to those of the data."""

    turn: Floats  # of fixed effects
    shift: Floats
    spread: Floats  # of random effects, site and nested
    response: float
    log_columns: float  # sum of the logarithms of the scales of kept columns


def scales_of(design: Design, server: Tree) -> Scaled:
    center, spread = server["center"].double().numpy(), server["spread"].double().numpy()
    p, size = len(design.fixed), len(design.features) - 3
    is_scaled = design.family == "gaussian"
    response, level = (spread[-1], center[-1]) if is_scaled else (1.0, 0.0)
    kept = server["kept"].numpy() > 0
    inverse = np.where(spread[:p] > 0, 1 / np.where(spread[:p] > 0, spread[:p], 1), 0)
    turn = np.diag(inverse) * response
    shift = np.zeros(p)
    if design.has_intercept:
        turn[0, 1:] = -center[1:p] * inverse[1:] * response
        shift[0] = level
    logs = float(np.log(spread[:p][kept]).sum())
    return Scaled(turn, shift, response / spread[p:size], response, logs)


def coefficient(name: str, estimate: float, variance: float, level: float, df: float | None = None) -> Coefficient:
    """A fixed effect with its test against 0."""
    error = math.sqrt(max(variance, 0.0))
    statistic = estimate / error if error > 0 else math.nan
    distribution = stats.norm if df is None else stats.t(df)
    p = float(2 * distribution.sf(abs(statistic)))
    reach = float(distribution.ppf((1 + level) / 2)) * error
    return Coefficient(name, estimate, error, df, statistic, p, estimate - reach, estimate + reach)


def random_parts(
    design: Design, relative: Floats, sigma: float | None, scaled: Scaled, ends: Floats | None
) -> list[Any]:
    """Standard deviations and correlations in the units of the data."""
    names = [(design.formula.site, n) for block in design.random for n in block]
    names += [(design.group, n) for block in design.nested for n in block]
    covariance = relative @ relative.T * scaled.spread[:, None] * scaled.spread
    covariance = covariance / scaled.response**2 * (sigma or 1.0) ** 2
    is_zero = np.sqrt(np.diag(relative @ relative.T)) < ZERO_SD
    deviations, parts = np.where(is_zero, 0.0, np.sqrt(np.diag(covariance))), list[Any]()
    blocks = tuple(len(b) for b in (*design.random, *design.nested))
    for k, target in enumerate(targets(blocks, sigma is not None)):
        low, high = (None, None) if ends is None else map(float, ends[k])
        if not target.places:
            parts.append(RandomPart("", "Residual", "sd", float(sigma or 0), *_scaled(low, high, scaled.response)))
        elif len(target.places) == 1:
            group, term = names[target.places[0]]
            value = float(deviations[target.places[0]])
            parts.append(
                RandomPart(group, term, "sd", value, *_scaled(low, high, float(scaled.spread[target.places[0]])))
            )
        else:
            i, j = target.places
            product = deviations[i] * deviations[j]
            value = float(covariance[i, j] / product) if product > 0 else math.nan
            parts.append(RandomPart(names[i][0], f"{names[i][1]}, {names[j][1]}", "correlation", value, low, high))
    return parts


def _scaled(low: float | None, high: float | None, unit: float) -> tuple[float | None, float | None]:
    return None if low is None else float(low * unit), None if high is None else float(high * unit)


def relative_factor(design: Design, theta: Tensor) -> Floats:
    blocks = tuple(len(block) for block in (*design.random, *design.nested))
    return factor_of(theta, blocks).double().numpy()


def is_on_boundary(design: Design, theta: Floats) -> bool:
    """Whether a variance is 0 or a correlation one in size."""
    blocks = tuple(len(block) for block in (*design.random, *design.nested))
    return any(theta[k] < TINY_SD for k, (i, j) in enumerate(lower_entries(blocks)) if i == j)


def explained(
    design: Design, server: Tree, beta: Floats, relative: Floats, variance: float, family: str
) -> tuple[float | None, float | None, float | None]:
    """ICC, marginal and conditional R2, in the units that sites agreed on; none without an intercept."""
    if not design.has_intercept:
        return None, None, None
    rows, p, q = float(server["counts"][0]), len(beta), len(relative)
    products = server["products"].double().numpy() / rows
    of_fixed = float(beta[1:] @ products[1:p, 1:p] @ beta[1:])
    square = relative @ relative.T * (variance if family == "gaussian" else 1.0)
    of_random = float((square * products[p : p + q, p : p + q]).sum())
    if family == "gaussian":
        rest = variance
    elif family == "binomial":
        rest = LOGISTIC
    else:  # lognormal, at the mean rate
        rest = math.log1p(1 / math.exp(beta[0] + (of_fixed + of_random) / 2))
    total = of_fixed + of_random + rest
    icc = of_random / (of_random + rest) if q else None
    return icc, of_fixed / total, (of_fixed + of_random) / total


def groups_of(design: Design, server: Tree, sites: int) -> dict[str, int]:
    groups = {design.formula.site: sites}
    return groups | ({design.group: int(server["counts"][1])} if design.group else {})


def linear_estimates(design: Design, server: Tree, reml: bool, sites: int, level: float) -> Estimates:
    """A linear mixed model."""
    scaled, kept = scales_of(design, server), server["kept"] > 0
    p, rows = len(design.fixed), float(server["counts"][0])
    sums = server["terms"], server["first"], server["second"]
    solved = profiled_deviance.solve(server["terms"], p, kept, rows, reml)
    variance, theta = float(solved.variance), server["theta"].double().numpy()
    beta = solved.beta.double().numpy()
    estimate = scaled.turn @ beta + scaled.shift
    covariance = scaled.turn @ solved.inverse.double().numpy() @ scaled.turn.T * variance
    freedoms = satterthwaite(sums, p, kept, rows, reml, scaled.turn)
    at = np.flatnonzero(kept.numpy())
    table = tuple(
        coefficient(design.fixed[j], float(estimate[j]), float(covariance[j, j]), level, freedoms[j]) for j in at
    )
    deviance = float(profiled_deviance.deviance(server["terms"], p, kept, rows, reml))
    deviance += 2 * solved.freedom * math.log(scaled.response) + (2 * scaled.log_columns if reml else 0)
    relative, sigma = relative_factor(design, server["theta"]), math.sqrt(variance) * scaled.response
    ends = server["intervals"].numpy() if "intervals" in server else None
    icc, marginal, conditional = explained(design, server, beta, relative, variance, "gaussian")
    return Estimates(
        formula=design.formula.text,
        family="gaussian",
        method="REML" if reml else "ML",
        coefficients=table,
        random=tuple(random_parts(design, relative, sigma, scaled, ends)),
        dropped=tuple(name for name, is_kept in zip(design.fixed, kept.tolist(), strict=True) if not is_kept),
        loglik=-deviance / 2,
        parameters=len(at) + len(theta) + 1,
        rows=int(rows),
        groups=groups_of(design, server, sites),
        sigma=sigma,
        icc=icc,
        r2_marginal=marginal,
        r2_conditional=conditional,
        is_singular=is_on_boundary(design, theta),
        is_settled=bool(server["settled"] > 0),
        level=level,
        covariance=covariance[np.ix_(at, at)],
    )


def satterthwaite(
    sums: tuple[Tensor, Tensor, Tensor], fixed: int, kept: Tensor, rows: float, reml: bool, turn: Floats
) -> list[float]:
    """Degrees of freedom of each coefficient: 2 v^2 over the variance of v, its estimated variance."""
    sigma = profiled_deviance.solve(sums[0], fixed, kept, rows, reml).variance.sqrt()
    point = profiled_deviance.expand_with_sigma(*sums, fixed, kept, rows, reml, sigma)
    values, vectors = np.linalg.eigh(point.hessian)
    good = values > 1e-8 * max(values.max(), 1e-300)
    spread = 2 * (vectors[:, good] / values[good]) @ vectors[:, good].T
    contrasts = torch.from_numpy(turn)

    def variances(step: Tensor) -> Tensor:
        terms = profiled_deviance.near(*sums, step[:-1])
        inverse = profiled_deviance.solve(terms, fixed, kept, rows, reml).inverse
        return (sigma + step[-1]).square() * ((contrasts @ inverse) * contrasts).sum(1)

    zero = sums[1].new_zeros(sums[1].shape[1] + 1)
    value, slopes = variances(zero).numpy(), forward_mode.jacobian(variances)(zero).numpy()
    noise = np.einsum("ij,jk,ik->i", slopes, spread, slopes)
    return [float(2 * v**2 / s) if s > 0 else math.inf for v, s in zip(value, noise, strict=True)]


def counts_estimates(design: Design, server: Tree, sites: int, level: float) -> Estimates:
    """A binomial or Poisson mixed model."""
    scaled, kept, p = scales_of(design, server), server["kept"].numpy() > 0, len(design.fixed)
    free, hessian = server["free"].double().numpy(), server["hessian"].double().numpy()
    beta, theta = free[:p], free[p:]
    covariance, at = _covariance(hessian, kept, np.concatenate([kept, np.ones(len(theta), bool)]), free, p)
    diverging = _diverging(design, covariance, at, float(server["counts"][0]))
    covariance = scaled.turn @ covariance @ scaled.turn.T
    estimate = scaled.turn @ beta + scaled.shift
    relative = relative_factor(design, server["free"][p:])
    ends = server["intervals"].numpy() if "intervals" in server else None
    icc, marginal, conditional = explained(design, server, beta, relative, 1.0, design.family)
    rows = float(server["counts"][0])
    return Estimates(
        formula=design.formula.text,
        family=design.family,
        method="ML (Laplace)" if len(theta) else "ML",
        coefficients=tuple(
            coefficient(design.fixed[j], float(estimate[j]), float(covariance[j, j]), level) for j in at
        ),
        random=tuple(random_parts(design, relative, None, scaled, ends)),
        dropped=tuple(name for name, is_kept in zip(design.fixed, kept, strict=True) if not is_kept),
        loglik=-float(server["deviance"]) / 2,
        parameters=len(at) + len(theta),
        rows=int(rows),
        groups=groups_of(design, server, sites),
        icc=icc,
        r2_marginal=marginal,
        r2_conditional=conditional,
        is_singular=is_on_boundary(design, theta),
        diverging=diverging,
        is_settled=bool(server["settled"] > 0),
        level=level,
        covariance=covariance[np.ix_(at, at)],
    )


def _covariance(
    hessian: Floats, kept: NDArray[np.bool_], used: NDArray[np.bool_], free: Floats, p: int
) -> tuple[Floats, NDArray[np.intp]]:
    """Of fixed effects, by the curvature of the deviance over all parameters that are not on a bound."""
    inside = used & ((np.arange(len(free)) < p) | (np.abs(free) > TINY_SD))
    inverse = np.zeros_like(hessian)
    inverse[np.ix_(inside, inside)] = 2 * np.linalg.pinv(hessian[np.ix_(inside, inside)], rcond=1e-15, hermitian=True)
    return inverse[:p, :p], np.flatnonzero(kept)


def _diverging(design: Design, covariance: Floats, at: NDArray[np.intp], rows: float) -> tuple[str, ...]:
    """Coefficients about which the rows know nothing where they have ended: they grow for ever (separation)."""
    return tuple(design.fixed[j] for j in at if covariance[j, j] * rows * INFORMATION > 1)


def cox_estimates(design: Design, server: Tree, sites: int, level: float) -> Estimates:
    """A Cox model with a baseline for every site."""
    scaled, kept, p = scales_of(design, server), server["kept"].numpy() > 0, len(design.fixed)
    free, hessian = server["free"].double().numpy(), server["hessian"].double().numpy()
    covariance, at = _covariance(hessian, kept, kept, free, p)
    diverging = _diverging(design, covariance, at, float(server["counts"][2]))
    covariance, estimate = scaled.turn @ covariance @ scaled.turn.T, scaled.turn @ free
    rows, events = float(server["counts"][0]), float(server["counts"][2])
    return Estimates(
        formula=design.formula.text,
        family="cox",
        method="partial likelihood, Efron",
        coefficients=tuple(
            coefficient(design.fixed[j], float(estimate[j]), float(covariance[j, j]), level) for j in at
        ),
        random=(),
        dropped=tuple(name for name, is_kept in zip(design.fixed, kept, strict=True) if not is_kept),
        loglik=-float(server["deviance"]) / 2,
        null_loglik=-float(server["null"]) / 2,
        parameters=len(at),
        rows=int(rows),
        groups={"strata": sites},
        events=int(events),
        diverging=diverging,
        is_settled=bool(server["settled"] > 0),
        level=level,
        covariance=covariance[np.ix_(at, at)],
    )


def estimates_of(design: Design, server: Tree, reml: bool, sites: int, level: float) -> Estimates:
    if design.family == "gaussian":
        return linear_estimates(design, server, reml, sites, level)
    if design.family == "cox":
        return cox_estimates(design, server, sites, level)
    return counts_estimates(design, server, sites, level)


def modes_of(
    design: Design, estimates: Estimates, server: Tree, sites: tuple[str, ...], modes: Floats, covariances: Floats
) -> tuple[Mode, ...]:
    """Conditional modes of every site with intervals, in the units of the data."""
    scaled = scales_of(design, server)
    fixed = {c.term: c.estimate for c in estimates.coefficients}
    spread = {p.term: p.estimate for p in estimates.random if p.kind == "sd" and p.group == design.formula.site}
    reach, out = float(stats.norm.ppf((1 + estimates.level) / 2)), []
    names = [name for block in design.random for name in block]
    for i, site in enumerate(sites):
        for k, name in enumerate(names):
            value = float(modes[i, k] * scaled.spread[k])
            error = math.sqrt(max(float(covariances[i, k, k]), 0.0)) * float(scaled.spread[k])
            low, high = value - reach * error, value + reach * error
            shrinkage = min((error / spread[name]) ** 2, 1.0) if spread[name] > 0 else 1.0
            out.append(Mode(site, name, value, error, low, high, fixed.get(name, 0.0) + value, shrinkage))
    return tuple(out)
