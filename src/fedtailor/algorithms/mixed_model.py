"""MixedModel: a linear mixed model without pooling the data, by its profiled deviance.

Laird, Ware, Biometrics 38, 1982, for the model; Bates, Maechler, Bolker, Walker, J. Stat. Softw. 67, 2015, equations 34
and 42, for what is minimised. Every term is a sum over clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared import doubts
from fedtailor.algorithms._shared.random_coefficients import NORMAL
from fedtailor.algorithms._shared.random_effects import WITHIN, free_entries, varying, within
from fedtailor.algorithms.joint_ls import VECTOR
from fedtailor.algorithms.linear_alone import LinearAlone
from fedtailor.core.algorithm import NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import reml, ridge


@dataclass(frozen=True)
class MixedModel(Algorithm):
    """Common coefficients, and random ones around them whose spread is estimated from all clients; only sums leave."""

    effects: Literal["auto", "none", "intercept", "diagonal", "full"] = "auto"
    """Which coefficients vary between clients, and whether together; auto: by the Schwarz criterion."""

    reml: bool = True
    """Restricted instead of plain maximum likelihood."""

    penalty: float = 0.0
    """Ridge penalty on the common coefficients, in units of the noise; not on the intercept."""

    keep_own: bool = False
    """A client serves its own ridge regression where that predicts its left-out rows better: no other can harm it."""

    title: ClassVar[str] = "MixedModel"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "model"
    most_calls: ClassVar[int] = 5000
    onboards_fitted: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    citation: ClassVar[str] = """@article{bates2015lme4,
  title={Fitting Linear Mixed-Effects Models Using lme4},
  author={Bates, Douglas and M{\\"a}chler, Martin and Bolker, Ben and Walker, Steve},
  journal={Journal of Statistical Software}, volume={67}, number={1}, year={2015}
}"""

    def check(self, model: Model, task: str) -> None:
        ridge.check(model, task)

    def server_init(self, model: Model) -> Tree:
        w = ridge.as_vector(model, model.params)
        square = w.new_zeros((len(w), len(w)))
        return {"beta": torch.zeros_like(w), "factor": square, "covariance": square, "noise": w.new_ones(())}

    def client_init(self, me: ClientContext) -> Tree:
        x, y = ridge.design_of(me.model, me.train), me.train.y * me.train.mask[:, None]
        count = me.train.mask.sum() * y.shape[-1]
        return {"a": x.mT @ x, "b": x.mT @ y, "c": y.square().sum(), "count": count}

    def round(self, fed: Federation, server: Tree) -> Tree:
        penalty = torch.full_like(server["beta"][:, 0], self.penalty)
        is_intercept = torch.zeros_like(penalty, dtype=torch.bool)
        if ridge.names(fed.model)[1] is not None:
            penalty[-1], is_intercept[-1] = 0, True
        varies = varying(fed.sum(fed.map(self.variation)), is_intercept)
        problem = reml.Problem(
            sums=lambda factor: reml.Marginal(*fed.sum(fed.map(self.marginal, factor))),
            slopes=lambda *message: fed.sum(fed.map(self.slope, *message)),
            penalty=penalty,
            reml=self.reml,
        )
        structures = free_entries(self.effects, varies, is_intercept)
        found = reml.best(problem, structures, server["factor"], len(fed.cohort))
        fed.report(noise=found.noise, deviance=found.deviance, exchanges=found.exchanges)
        return {"beta": found.beta, "factor": found.factor, "covariance": found.covariance, "noise": found.noise}

    @on_client(sends=WITHIN.summed(), doubt=doubts.of_variation)
    def variation(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, within(ridge.design_of(me.model, me.train), me.train.mask)

    @on_client(sends=(NORMAL.summed(), VECTOR.summed(), *3 * (NUMBER.summed(),)), doubt=doubts.of_marginal)
    def marginal(self, me: ClientContext, factor: Tensor) -> tuple[Tree, Tree]:
        d = me.state
        return d, tuple(reml.marginal(d["a"], d["b"], d["c"], d["count"], factor))

    @on_client(sends=(NORMAL.summed(), NORMAL.summed()), doubt=doubts.of_squares)
    def slope(self, me: ClientContext, factor: Tensor, beta: Tensor, inverse: Tensor) -> tuple[Tree, Tree]:
        return me.state, reml.slope(me.state["a"], me.state["b"], factor, beta, inverse)

    def personal(self, me: ClientContext, server: Tree) -> Params:
        common, own, is_own = self.candidates(me, server)
        return ridge.as_params(me.model, torch.where(is_own, own, common) if self.keep_own else common)

    def candidates(self, me: ClientContext, server: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """The client's coefficients given all data, those of its own rows, and whether the latter are kept."""
        d, beta = me.state, server["beta"]
        cov, _ = reml.posterior(d["a"], server["factor"])
        common = beta + cov @ (d["b"] - d["a"] @ beta)
        if not self.keep_own:
            return common, common, beta.new_zeros((), dtype=torch.bool)
        x, (_, y, mask) = ridge.design_of(me.model, me.train), me.train
        own, errors = LinearAlone().numbers_and_errors(x, y, mask, ridge.names(me.model)[1] is not None)
        leverage = ((x @ cov) * x).sum(1, keepdim=True)
        rest = mask[:, None] * (y - x @ common) / (1 - leverage).clamp(min=1e-3)
        return common, own, ~(rest.square().sum() <= errors.sum())  # also where it is no number

    def shares(self, me: ClientContext, server: Tree) -> Params:
        cov, _ = reml.posterior(me.state["a"], server["factor"])
        own = torch.diagonal(cov @ me.state["a"], dim1=-2, dim2=-1)
        common = (1 - own).clamp(0, 1)[:, None].expand_as(server["beta"])
        is_own = self.candidates(me, server)[2]
        return ridge.as_params(me.model, torch.where(is_own, torch.zeros_like(common), common))
