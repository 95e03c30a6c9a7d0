"""Whether a column's effect differs between sites: a likelihood ratio test of its variance in the mixed model.

The model is fitted again without random effects of the column, from the sites' sums. A variance cannot be below 0, so
half of the reference distribution has one degree of freedom less: Self, Liang, J. Am. Stat. Assoc. 82, 1987.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.stats import chi2  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.numerics import reml

STEPS, RESTARTS = 40, 2  # of a fit that begins near its end
LEVEL = 0.05


def random_entries(factor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Free entries of a fitted factor: of its rows that are not 0, with covariances if it has any."""
    rows = np.flatnonzero((factor != 0).any(1).numpy())
    if not bool((factor.tril(-1) != 0).any()):
        return rows, rows
    below, beside = np.tril_indices(len(rows))
    return rows[below], rows[beside]


def problem_of(a: Tensor, b: Tensor, c: Tensor, count: Tensor, penalty: Tensor, noise: float | None) -> reml.Problem:
    """The deviance of sites whose cross products are known [sites, ...]."""
    sums = torch.func.vmap(reml.marginal, in_dims=(0, 0, 0, 0, None))
    slopes = torch.func.vmap(reml.slope, in_dims=(0, 0, None, None, None))

    def total(factor: Tensor) -> reml.Marginal:
        return reml.Marginal(*(v.sum(0) for v in sums(a, b, c, count, factor)))

    def slope(factor: Tensor, beta: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        squares, lost = slopes(a, b, factor, beta, inverse)
        return squares.sum(0), lost.sum(0)

    return reml.Problem(total, slope, penalty, noise=noise, widest=None if noise is None else 5.0)


def difference_tests(problem: reml.Problem, factor: Tensor, columns: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """P-values, by column; of one without random effects it is 1."""
    rows, across = random_entries(factor)
    whole, _ = problem.at(factor)
    out = {}
    for name, places in columns.items():
        lost = np.isin(rows, places) | np.isin(across, places)
        if not lost.any():
            out[name] = 1.0
            continue
        start = factor.clone()
        start[list(places)], start[:, list(places)] = 0, 0
        reduced = reml.fit(problem, (rows[~lost], across[~lost]), start, STEPS, RESTARTS)
        ratio = max(reduced.deviance - whole, 0.0)
        more = int(lost.sum())
        fewer = float(chi2.sf(ratio, more - 1)) if more > 1 else float(ratio <= 0)
        out[name] = (fewer + float(chi2.sf(ratio, more))) / 2
    return out
