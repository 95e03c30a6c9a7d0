"""MixedLogit: logistic and multinomial mixed models without pooling the data, by penalised quasi-likelihood.

Breslow, Clayton, J. Am. Stat. Assoc. 88, 1993: at the clients' modes the likelihood is replaced by that of a working
response, whose linear mixed model is fitted as in MixedModel; repeated until nothing moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared.random_effects import WITHIN, free_entries, varying, within
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import logits, mixed_model, ridge


def _flat(algorithm: Algorithm, model: Model) -> Tensor:
    return logits.flat(ridge.as_vector(model, model.params)[:, 1:])[:, None]


VECTOR = ReplySpec("vector of the model's size", _flat)
SQUARE = ReplySpec("curvature", lambda algorithm, model: torch.diag(_flat(algorithm, model)[:, 0] * 0))
AUTO = ("intercept", "diagonal")


@dataclass(frozen=True)
class MixedLogit(Algorithm):
    """Common coefficients of the classes' logits, and random ones around them; only sums leave."""

    effects: Literal["auto", "none", "intercept", "diagonal", "full"] = "auto"
    """Which coefficients vary between clients, and whether together; auto: intercept or all, by evidence."""

    penalty: float = 1.0
    """Ridge penalty on the common coefficients; not on the intercept."""

    steps: int = 10
    """Maximum number of working responses per round."""

    newton: int = 6
    """Newton steps of a client to its mode."""

    title: ClassVar[str] = "MixedLogit"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "model"
    onboards_fitted: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    citation: ClassVar[str] = """@article{breslow1993approximate,
  title={Approximate Inference in Generalized Linear Mixed Models},
  author={Breslow, Norman E. and Clayton, David G.},
  journal={Journal of the American Statistical Association}, volume={88}, number={421}, year={1993}
}"""

    def check(self, model: Model, task: str) -> None:
        ridge.names(model)
        if task != "classification":
            raise ConfigError(f"algorithm.name: this algorithm is for classification, not {task}")

    def server_init(self, model: Model) -> Tree:
        flat = _flat(self, model)
        return {
            "beta": torch.zeros_like(flat),
            "factor": torch.diag(flat[:, 0] * 0),
            "covariance": torch.diag(flat[:, 0] * 0),
        }

    def client_init(self, me: ClientContext) -> Tree:
        flat = _flat(self, me.model)
        return {"a": torch.diag(flat[:, 0] * 0), "b": flat * 0, "c": flat.sum() * 0, "z": flat[:, 0] * 0}

    def round(self, fed: Federation, server: Tree) -> Tree:
        size = len(ridge.as_vector(fed.model, fed.model.params))
        classes = len(server["beta"]) // size
        is_intercept = torch.zeros_like(server["beta"][:size, 0], dtype=torch.bool)
        is_intercept[-1] = ridge.names(fed.model)[1] is not None
        varies = varying(fed.sum(fed.map(self.variation)), is_intercept)
        varies, is_intercept = varies.repeat(classes), is_intercept.repeat(classes)
        penalty = torch.where(is_intercept, 1e-6, self.penalty).to(server["beta"].dtype)
        found = None
        for effects in AUTO if self.effects == "auto" else (self.effects,):
            (at,) = free_entries(effects, varies, is_intercept)
            tried = self.fitted(fed, server["beta"], server["factor"], penalty, at)
            if found is None or tried[0] < found[0]:
                found = tried
        assert found is not None
        fed.report(evidence=-found[0] / 2)
        fed.map(self.linearise, found[1].beta, found[1].factor)
        return {"beta": found[1].beta, "factor": found[1].factor, "covariance": found[1].covariance}

    def fitted(
        self, fed: Federation, beta: Tensor, factor: Tensor, penalty: Tensor, at: mixed_model.Entries
    ) -> tuple[float, mixed_model.Fitted]:
        """Schwarz's criterion of the Laplace approximation, and what was fitted."""
        problem = mixed_model.Problem(
            sums=lambda factor: mixed_model.Marginal(*fed.sum(fed.map(self.marginal, factor))),
            slopes=lambda *message: fed.sum(fed.map(self.slope, *message)),
            penalty=penalty,
            noise=1.0,
        )
        found = None
        for _ in range(self.steps):
            fed.map(self.linearise, beta, factor)
            found = mixed_model.fit(problem, at, factor, steps=8, restarts=2)
            moved = float((found.beta - beta).abs().max() + (found.factor - factor).abs().max())
            beta, factor = found.beta, found.factor
            if moved < 1e-4:
                break
        assert found is not None
        evidence = float(fed.sum(fed.map(self.evidence, beta, factor))) - float((penalty * beta[:, 0] ** 2).sum()) / 2
        return -2 * evidence + len(at[0]) * math.log(max(len(fed.cohort), 2)), found

    @on_client(sends=WITHIN)
    def variation(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, within(ridge.design_of(me.model, me.train), me.train.mask)

    @on_client()
    def linearise(self, me: ClientContext, beta: Tensor, factor: Tensor) -> tuple[Tree, Tree]:
        return self.working(me, beta, factor)[0], None

    @on_client(sends=NUMBER)
    def evidence(self, me: ClientContext, beta: Tensor, factor: Tensor) -> tuple[Tree, Tree]:
        state, likelihood = self.working(me, beta, factor)
        _, logdet = mixed_model.posterior(state["a"], factor)
        return state, likelihood - state["z"].square().sum() / 2 - logdet / 2

    def working(self, me: ClientContext, beta: Tensor, factor: Tensor) -> tuple[Tree, Tensor]:
        """Normal equations of the working response at the client's mode, and the log-likelihood there."""
        x, (_, y, mask) = ridge.design_of(me.model, me.train), me.train
        common = logits.unflat(beta[:, 0], beta.shape[0] // x.shape[1])
        z = logits.mode(x, y, mask, common, factor, me.state["z"], self.newton)
        v = beta + (factor @ z)[:, None]
        own = logits.unflat(v[:, 0], common.shape[1])
        gradient, curvature = logits.derivatives(x, y, mask, own)
        b = curvature @ v + gradient[:, None]
        c = (v * (b + gradient[:, None])).sum()
        return {"a": curvature, "b": b, "c": c, "z": z}, logits.log_likelihood(x, y, mask, own)

    @on_client(sends=(SQUARE, VECTOR, NUMBER, NUMBER, NUMBER))
    def marginal(self, me: ClientContext, factor: Tensor) -> tuple[Tree, Tree]:
        d = me.state
        return d, tuple(mixed_model.marginal(d["a"], d["b"], d["c"], me.n.to(d["c"].dtype), factor))

    @on_client(sends=(SQUARE, SQUARE))
    def slope(self, me: ClientContext, factor: Tensor, beta: Tensor, inverse: Tensor) -> tuple[Tree, Tree]:
        return me.state, mixed_model.slope(me.state["a"], me.state["b"], factor, beta, inverse)

    def personal(self, me: ClientContext, server: Tree) -> Params:
        beta, factor, x = server["beta"], server["factor"], ridge.design_of(me.model, me.train)
        common = logits.unflat(beta[:, 0], beta.shape[0] // x.shape[1])
        z = logits.mode(x, me.train.y, me.train.mask, common, factor, torch.zeros_like(beta[:, 0]), 2 * self.newton)
        own = common + logits.unflat(factor @ z, common.shape[1])
        return ridge.as_params(me.model, torch.cat([torch.zeros_like(own[:, :1]), own], dim=1))
