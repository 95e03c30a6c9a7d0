"""FormulaLinear: a linear mixed model of a formula by (restricted) maximum likelihood, without pooling the data.

Bates, Maechler, Bolker, Walker, J. Stat. Softw. 67, 2015; that sums of cross products suffice: Luo et al., DLMM, Nature
Communications 13, 2022. Here a site sends X'V^-1 X of its rows, with the random effects of groups inside it and its own
integrated out, and the derivatives by the relative factor: the server takes Newton steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtailor.algorithms._programs.formula_model import Columns, FormulaModel, bounded, like, total
from fedtailor.algorithms._programs.profile_intervals import intervals
from fedtailor.core.algorithm import NUMBER, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree
from fedtailor.errors import DataError
from fedtailor.numerics import bounded_newton, profiled_deviance
from fedtailor.numerics.cross_products import (
    derivatives,
    factor_of,
    group_sums,
    integrate_out,
    lower_entries,
    whiten,
)

TERMS = ReplySpec("cross products of columns, whitened", like("terms")).summed()
FIRST = ReplySpec("derivatives of whitened cross products", like("terms", "entries")).summed()
SECOND = ReplySpec("derivatives of whitened cross products", like("terms", "entries", "entries")).summed()


@dataclass(frozen=True)
class FormulaLinear(FormulaModel):
    """Fixed effects, effects that vary between sites, and between groups inside a site; only sums leave."""

    reml: bool = True
    """Restricted instead of plain maximum likelihood."""

    title: ClassVar[str] = "FormulaLinear"
    scales_response: ClassVar[bool] = True

    @property
    def terms(self) -> int:
        """Numbers in X'V^-1 X with the response, and log|V|."""
        return (self.fixed + 1) ** 2 + 1

    def fit(self, fed: Federation, server: Tree) -> Tree:
        kept = server["kept"] > 0
        rows, rank = float(server["counts"][0]), int(kept.sum())
        if rows <= rank + self.entries:
            raise DataError(f"formula: {rows:.0f} rows are too few for {rank} fixed effects and the variances")
        if self.nested and server["counts"][1] >= rows:
            raise DataError("formula: every row is a group of its own; its effect cannot be told from the residual")
        found = self.minimise(fed, server, self.reml)
        server = server | {"terms": found.terms, "first": found.first, "second": found.second, "theta": found.theta}
        settled = found.theta.new_tensor(float(found.is_settled))
        server |= {"settled": settled, "exchanges": found.theta.new_tensor(float(found.evaluations))}
        state = profiled_deviance.solve(found.terms, self.fixed, kept, rows, self.reml)
        if not state.variance > 1e-13:  # of a variance of 1; sums of squares round so much
            raise DataError("formula: the fixed effects explain the response exactly; there is no residual variance")
        fed.map(self.settle, state.beta, found.theta, state.variance)
        if self.profile:
            server |= {"intervals": self.profile_intervals(fed, server)}
        return server

    def profile_intervals(self, fed: Federation, server: Tree) -> Tensor:
        """Of standard deviations, correlations and the residual standard deviation, by maximum likelihood."""
        kept, rows, like = server["kept"] > 0, float(server["counts"][0]), server["center"]
        found = self.minimise(fed, server, reml=False, start=server["theta"])
        sigma = profiled_deviance.solve(found.terms, self.fixed, kept, rows, False).variance.sqrt()

        def by_order(order: list[int]) -> Callable[[bounded_newton.Floats], bounded_newton.Point]:
            def evaluate(free: bounded_newton.Floats) -> bounded_newton.Point:
                sums = self.at(fed, like.new_tensor(free[:-1]), order)
                return profiled_deviance.expand_with_sigma(
                    *sums, self.fixed, kept, rows, False, like.new_tensor(free[-1])
                )

            return evaluate

        theta, others = found.theta.double().numpy(), np.array([float(sigma)])
        ends = intervals(by_order, self.all_blocks, theta, others, True, self.profile)
        return like.new_tensor(list(ends))

    def at(self, fed: Federation, theta: Tensor, order: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Summed terms and their derivatives, with the effects in some order."""
        size = self.random + self.nested
        order = list(range(size)) if order is None else order
        rows = torch.eye(size, dtype=theta.dtype, device=theta.device)[:, order]
        terms, first, second, astray = total(fed, fed.map(self.whitened, theta, rows))
        return torch.where(astray > 0.5, torch.nan, terms), first, second

    def minimise(self, fed: Federation, server: Tree, reml: bool, start: Tensor | None = None) -> Found:
        """The least deviance over the relative factor."""
        kept, rows = server["kept"] > 0, float(server["counts"][0])
        entries = lower_entries(self.all_blocks)
        lower = np.array([0.0 if i == j else -np.inf for i, j in entries])
        first_guess = np.array([1.0 if i == j else 0.0 for i, j in entries]) if start is None else start.numpy()
        latest: dict[bytes, tuple[Tensor, Tensor, Tensor]] = {}

        def evaluate(theta: bounded_newton.Floats) -> bounded_newton.Point:
            terms, first, second = self.at(fed, server["center"].new_tensor(theta))
            latest.clear()
            latest[theta.tobytes()] = terms, first, second
            return profiled_deviance.expand(terms, first, second, self.fixed, kept, rows, reml)

        found = bounded_newton.minimise_from_several(evaluate, first_guess, lower, np.ones_like(lower))
        if found.at.tobytes() not in latest:
            evaluate(found.at)
        terms, first, second = latest[found.at.tobytes()]
        theta = server["center"].new_tensor(found.at)
        return Found(theta, terms, first, second, found.is_settled, found.evaluations)

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the effects between sites and between groups inside a site."""
        count = len(lower_entries(self.blocks))
        return factor_of(theta[:count], self.blocks), factor_of(theta[count:], self.nested_blocks)

    def cross(self, d: Columns, nested: Tensor) -> tuple[Tensor, Tensor]:
        """Cross products of [x, z, y] without the effects of groups inside the site."""
        whole = torch.cat([d.x, d.z, (d.y - d.offset)[:, None]], dim=1) * d.mask[:, None]
        cross = whole.mT @ whole
        if not nested.shape[0]:
            return cross, cross.new_zeros(())
        w = d.w * d.mask[:, None]
        squares = group_sums(w[:, :, None] * w[:, None, :], d.group)
        rows = group_sums(w[:, :, None] * whole[:, None, :], d.group)
        half, logdet = whiten(squares, rows, nested)
        return cross - (half.mT @ half).sum(0), logdet.sum()

    @on_client(sends=(TERMS, FIRST, SECOND, NUMBER.summed()))
    def whitened(self, me: ClientContext, theta: Tensor, places: Tensor) -> tuple[Tree, Tree]:
        """`places` @ factor: the factor with its effects in their own order."""
        d, q = self.rows(me), self.random

        def terms(theta: Tensor) -> Tensor:
            own, nested = self.split(theta)
            own, nested = places[:q, :q] @ own, places[q:, q:] @ nested
            cross, inner = self.cross(d, nested)
            rest, outer = integrate_out(cross, self.fixed, own)
            return torch.cat([rest.flatten(), (inner + outer)[None]])

        return me.state, bounded(derivatives(terms, theta))

    @on_client()
    def settle(self, me: ClientContext, beta: Tensor, theta: Tensor, variance: Tensor) -> tuple[Tree, Tree]:
        """The site's modes and their covariance; they stay here."""
        own, nested = self.split(theta)
        cross, _ = self.cross(self.rows(me), nested)
        a, b = self.fixed, self.fixed + self.random
        rest = cross[a:b, b] - cross[a:b, :a] @ beta
        eye = torch.eye(self.random, dtype=theta.dtype, device=theta.device)
        half, _ = whiten(cross[a:b, a:b], eye, own)
        spread = half.mT @ half  # L (I + L'Z'ZL)^-1 L'
        state = me.state | {"beta": beta + me.state["beta"] * 0, "modes": spread @ rest}
        return state | {"modes_covariance": variance * spread}, None


@dataclass(frozen=True)
class Found:
    """A minimum of the deviance, with the sums there."""

    theta: Tensor
    terms: Tensor
    first: Tensor
    second: Tensor
    is_settled: bool
    evaluations: int
