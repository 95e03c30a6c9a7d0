"""FormulaCounts: binomial and Poisson mixed models of a formula by Laplace's approximation, without pooling the data.

Pinheiro, Chao, J. Comput. Graph. Stat. 15, 2006, section 2; Bates, Maechler, Bolker, Walker, J. Stat. Softw. 67, 2015.
As glmer has it, fixed effects and variances maximise the approximation together. Each site sends its value
with gradient and Hessian: the server takes Newton steps, and standard errors are those of the whole Hessian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedtailor.algorithms._programs.formula_model import FormulaModel, bounded, like, total
from fedtailor.algorithms._programs.profile_intervals import intervals
from fedtailor.core.algorithm import NUMBER, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import bounded_newton, forward_mode, reml
from fedtailor.numerics.cross_products import factor_of, lower_entries
from fedtailor.numerics.exponential_families import FAMILIES
from fedtailor.numerics.newton import mode, newton_step

GRADIENT = ReplySpec("gradient of the likelihood", like("free")).summed()
HESSIAN = ReplySpec("curvature of the likelihood", like("free", "free")).summed()
NEWTON = 10  # steps of a site to its modes
PARTS = (1.0, 0.4, 0.1, 0.02, 0.0)  # of a step: rates grow exponentially, and a whole one may go far astray
AT_MODE = 1e-5  # a step that is shorter ends at the mode


@dataclass(frozen=True)
class FormulaCounts(FormulaModel):
    """Fixed effects and effects that vary between sites, of log odds or log rates; only sums leave."""

    family: Literal["binomial", "poisson"] = "binomial"
    """What the counts are drawn from."""

    title: ClassVar[str] = "FormulaCounts"

    @property
    def free(self) -> int:
        """Fixed effects and entries of the relative factor."""
        return self.fixed + self.entries

    def check(self, model: object, task: str) -> None:
        super().check(model, task)  # type: ignore[arg-type]
        if self.nested_blocks:
            raise ConfigError("formula: groups inside a site are for numbers only (family gaussian)")

    def client_init(self, me: ClientContext) -> Tree:
        return super().client_init(me) | {"z": me.n.to(me.model.dtype) * 0 + me.model.like.new_zeros(self.random)}

    def fit(self, fed: Federation, server: Tree) -> Tree:
        entries = lower_entries(self.blocks)
        lower = np.array([-np.inf] * self.fixed + [0.0 if i == j else -np.inf for i, j in entries])
        unit = np.array([1.0 if i == j else 0.0 for i, j in entries])

        def evaluate(free: bounded_newton.Floats) -> bounded_newton.Point:
            return self.point(fed, server["center"].new_tensor(free))

        def by_order(order: list[int]) -> Callable[[bounded_newton.Floats], bounded_newton.Point]:
            turn = np.r_[np.arange(len(entries), len(entries) + self.fixed), np.arange(len(entries))]

            def turned(free: bounded_newton.Floats) -> bounded_newton.Point:
                point = self.point(fed, server["center"].new_tensor(free[turn]), order)
                back = np.argsort(turn)
                return bounded_newton.Point(point.value, point.gradient[back], point.hessian[np.ix_(back, back)])

            return turned

        def without_random(beta: bounded_newton.Floats) -> bounded_newton.Point:
            point, p = evaluate(np.concatenate([beta, 0 * unit])), self.fixed
            return bounded_newton.Point(point.value, point.gradient[:p], point.hessian[:p, :p])

        first = bounded_newton.minimise(without_random, np.zeros(self.fixed), lower[: self.fixed])
        found = first
        if entries:
            start = np.concatenate([first.at, unit])
            found = bounded_newton.minimise_from_several(evaluate, start, lower, np.ones_like(lower), longest=1.0)
        free = server["center"].new_tensor(found.at)
        fed.map(self.settle, free)
        server = server | {"free": free, "deviance": free.new_tensor(found.point.value)}
        server |= {"hessian": free.new_tensor(found.point.hessian), "settled": free.new_tensor(float(found.is_settled))}
        if self.profile and entries:
            ends = intervals(by_order, self.blocks, found.at[self.fixed :], found.at[: self.fixed], False, self.profile)
            server |= {"intervals": free.new_tensor(list(ends))}
        return server | {"exchanges": free.new_tensor(float(first.evaluations + found.evaluations))}

    def point(self, fed: Federation, free: Tensor, order: list[int] | None = None) -> bounded_newton.Point:
        """Minus twice the approximation, with its derivatives; with the random effects in some order."""
        order = list(range(self.random)) if order is None else order
        places = torch.eye(self.random, dtype=free.dtype, device=free.device)[:, order]
        value, gradient, hessian, astray = total(fed, fed.map(self.approximation, free, places))
        if astray > 0.5:  # away from its modes the approximation means nothing
            value = torch.full_like(value, -torch.inf)
        hessian = -(hessian + hessian.mT)
        return bounded_newton.Point(-2 * float(value), -2 * gradient.double().numpy(), hessian.double().numpy())

    def parts(self, me: ClientContext) -> tuple[Tensor, Tensor, Tensor]:
        """Columns of fixed and random effects; count, trials and offset; which rows count."""
        d = self.rows(me)
        return torch.cat([d.x, d.z], dim=1), torch.stack([d.y, d.weight, d.offset], dim=1), d.mask

    def spread_out(self, free: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Coefficients of all columns where random effects are 0, and what random effects add to them."""
        beta, theta = free[: self.fixed], free[self.fixed :]
        factor = factor_of(theta, self.blocks)
        factor = factor if places is None else places @ factor
        above = torch.zeros((self.fixed, self.random), dtype=free.dtype, device=free.device)
        return torch.cat([beta, factor.new_zeros(self.random)])[:, None], torch.cat([above, factor])

    @on_client(sends=(NUMBER.summed(), GRADIENT, HESSIAN, NUMBER.summed()))
    def approximation(self, me: ClientContext, free: Tensor, places: Tensor) -> tuple[Tree, Tree]:
        x, y, mask = self.parts(me)
        family = FAMILIES[self.family]
        common, factor = self.spread_out(free, places)
        settled, astray, inverse = me.state["z"], me.n.to(free.dtype) * 0, None
        if self.random:
            settled = mode(family, x, y, mask, common, factor, settled, NEWTON, PARTS)
            settled = settled + newton_step(family, x, y, mask, common, factor, settled)
            astray = (newton_step(family, x, y, mask, common, factor, settled).abs().amax() > AT_MODE).to(free.dtype)
            _, curvature = family.derivatives(x, y, mask, common + (factor @ settled)[:, None])
            eye = torch.eye(self.random, dtype=free.dtype, device=free.device)
            inverse = torch.linalg.inv(factor.mT @ curvature @ factor + eye)

        def value(free: Tensor) -> Tensor:
            common, factor = self.spread_out(free, places)
            z = settled
            for _ in range(2 if self.random else 0):
                # at the mode such a step is 0; the first one moves with it to first order, the second one to second
                gradient, _ = family.derivatives(x, y, mask, common + (factor @ z)[:, None])
                z = z + inverse @ (factor.mT @ gradient - z)
            own = common + (factor @ z)[:, None]
            likelihood = family.log_likelihood(x, y, mask, own)
            if not self.random:
                return likelihood
            _, curvature = family.derivatives(x, y, mask, own)
            _, logdet = reml.posterior(curvature, factor)
            return likelihood - z.square().sum() / 2 - logdet / 2

        gradient = torch.func.grad(value)(free)
        hessian = forward_mode.hessian(value)(free)
        *parts, is_large = bounded((value(free), gradient, hessian))
        return me.state | {"z": settled}, (*parts, astray + is_large)

    @on_client()
    def settle(self, me: ClientContext, free: Tensor) -> tuple[Tree, Tree]:
        """The site's modes and their covariance; they stay here."""
        x, y, mask = self.parts(me)
        common, factor = self.spread_out(free)
        state = me.state | {"beta": free[: self.fixed] + me.state["beta"] * 0}
        if not self.random:
            return state, None
        z = mode(FAMILIES[self.family], x, y, mask, common, factor, me.state["z"], NEWTON, PARTS)
        _, curvature = FAMILIES[self.family].derivatives(x, y, mask, common + (factor @ z)[:, None])
        spread, _ = reml.posterior(curvature, factor)
        own = factor[self.fixed :]
        return state | {"modes": own @ z, "modes_covariance": spread[self.fixed :, self.fixed :]}, None
