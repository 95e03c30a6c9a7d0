"""FormulaCox: Cox's proportional hazards with a baseline of each site's own, without pooling the data.

Cox, J. R. Stat. Soc. B 34, 1972; ties by Efron, J. Am. Stat. Assoc. 72, 1977. With sites as strata the partial
likelihood is a sum over sites, so Newton steps on summed derivatives are exact. (One-shot and approximate: ODAC, Duan
et al., J. Am. Med. Inform. Assoc. 27, 2020.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedtailor.algorithms._programs.formula_model import FormulaModel, bounded, like, total
from fedtailor.core.algorithm import NUMBER, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError, DataError
from fedtailor.numerics import bounded_newton, forward_mode
from fedtailor.numerics.partial_likelihood import partial_likelihood, tie_order

GRADIENT = ReplySpec("gradient of the likelihood", like("fixed")).summed()
HESSIAN = ReplySpec("curvature of the likelihood", like("fixed", "fixed")).summed()


@dataclass(frozen=True)
class FormulaCox(FormulaModel):
    """Log hazard ratios that all sites have in common; only sums leave."""

    title: ClassVar[str] = "FormulaCox"
    only_within: ClassVar[bool] = True

    def check(self, model: Model, task: str) -> None:
        super().check(model, task)
        if self.all_blocks or self.has_intercept:
            raise ConfigError("formula: a Cox model has no random effects; sites are its strata")

    def fit(self, fed: Federation, server: Tree) -> Tree:
        if server["counts"][2] < 1:
            raise DataError("formula: no event at any site")

        def evaluate(beta: bounded_newton.Floats) -> bounded_newton.Point:
            replies = fed.map(self.likelihood, server["center"].new_tensor(beta))
            value, gradient, hessian, astray = total(fed, replies)
            value = torch.where(astray > 0.5, -torch.inf, value)
            hessian = -(hessian + hessian.mT)
            return bounded_newton.Point(-2 * float(value), -2 * gradient.double().numpy(), hessian.double().numpy())

        start = np.zeros(self.fixed)
        null = evaluate(start).value
        found = bounded_newton.minimise(evaluate, start, np.full(self.fixed, -np.inf))
        free = server["center"].new_tensor(found.at)
        fed.map(self.settle, free)
        server = server | {"free": free, "deviance": free.new_tensor(found.point.value)}
        server |= {"hessian": free.new_tensor(found.point.hessian), "null": free.new_tensor(null)}
        settled = free.new_tensor(float(found.is_settled))
        return server | {"settled": settled, "exchanges": free.new_tensor(float(found.evaluations + 1))}

    def in_order(self, me: ClientContext) -> tuple[Tensor, ...]:
        """The order of rows by time, and where ties begin and end: facts of the data, with no derivative."""
        rows, weight = me.experiment.data.train, self.columns - 1 + 1
        sizes = rows.bounds(me.members)[1]

        def make(is_stacked: bool) -> tuple[Tensor, ...]:
            longest, parts = max(sizes), []
            for client, n in zip(me.members, sizes, strict=True):
                x, y = rows.of(client)
                ties = tie_order(y[:, 0].double().cpu().numpy(), x.flatten(1)[:, weight].double().cpu().numpy())
                more = np.arange(n, longest)
                padded = [np.concatenate([v, more]) for v in ties[:3]] + [np.pad(ties.share, (0, longest - n))]
                parts.append([torch.from_numpy(np.ascontiguousarray(v)).to(me.model.device) for v in padded])
            stacked = tuple(torch.stack(list(column)) for column in zip(*parts, strict=True))
            return stacked if is_stacked else tuple(v[0] for v in stacked)

        return me.constants(make)

    @on_client(sends=(NUMBER.summed(), GRADIENT, HESSIAN, NUMBER.summed()))
    def likelihood(self, me: ClientContext, beta: Tensor) -> tuple[Tree, Tree]:
        d = self.rows(me)
        order, *ties = self.in_order(me)
        x, event, mask = d.x[order], d.weight[order], d.mask[order]
        offset = d.offset[order]

        def value(beta: Tensor) -> Tensor:
            return partial_likelihood(torch.cat([x, offset[:, None]], 1), event, mask, tuple(ties), with_offset(beta))

        return me.state, bounded((value(beta), torch.func.grad(value)(beta), forward_mode.hessian(value)(beta)))

    @on_client()
    def settle(self, me: ClientContext, beta: Tensor) -> tuple[Tree, Tree]:
        return me.state | {"beta": beta + me.state["beta"] * 0}, None


def with_offset(beta: Tensor) -> Tensor:
    return torch.cat([beta, torch.ones_like(beta[:1])])
