"""Generalised linear mixed models without pooling the data: what logistic and Poisson ones have in common.

Penalised quasi-likelihood: at the clients' modes the likelihood is replaced by that of a working response, whose linear
mixed model is fitted as in MixedModel; repeated until nothing moves. From there Laplace's approximation of the
likelihood itself is maximised, if that is asked for. Every term is a sum over clients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.algorithms._shared import doubts
from fedtailor.algorithms._shared.random_effects import WITHIN, free_entries, varying, within
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import reml, ridge
from fedtailor.numerics.newton import Family, flat, mode, newton_step, unflat

AUTO = ("intercept", "diagonal")
CLOSE, NEAR = 1e-14, 1e-10  # relative change of the likelihood at which it is at its maximum; begun near it
WIDEST = 5.0  # standard deviation of a coefficient between clients, in logits or logarithms of rates


def _flat(algorithm: GeneralisedMixed, model: Model) -> Tensor:
    return flat(ridge.as_vector(model, model.params)[:, algorithm.fixed :])[:, None]


VECTOR = ReplySpec("vector of the model's size", _flat)
SQUARE = ReplySpec("curvature", lambda algorithm, model: torch.diag(_flat(algorithm, model)[:, 0] * 0))


@dataclass(frozen=True)
class GeneralisedMixed(Algorithm, ABC):
    """Common coefficients, and random ones around them; only sums leave."""

    effects: Literal["auto", "none", "intercept", "diagonal", "full"] = "auto"
    """Which coefficients vary between clients, and whether together; auto: intercept or all, by evidence."""

    penalty: float = 1.0
    """Ridge penalty on the common coefficients; not on the intercept."""

    laplace: bool = False
    """End with Laplace's approximation of the likelihood, as lme4 has it, in place of quasi-likelihood alone."""

    steps: int = 10
    """Maximum number of working responses per round."""

    laplace_steps: int = 200
    """Maximum number of L-BFGS steps on Laplace's approximation per round."""

    newton: int = 6
    """Newton steps of a client to its mode."""

    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "model"
    onboards_fitted: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    most_calls: ClassVar[int] = 5000
    task: ClassVar[str]
    fixed: ClassVar[int] = 0  # outputs whose coefficients are 0

    @property
    @abstractmethod
    def family(self) -> Family:
        """The likelihood."""

    def check(self, model: Model, task: str) -> None:
        ridge.names(model)
        if task != self.task:
            raise ConfigError(f"algorithm.name: this algorithm is for {self.task}, not {task}")

    def server_init(self, model: Model) -> Tree:
        v = _flat(self, model)
        square = torch.diag(v[:, 0] * 0)
        return {"beta": torch.zeros_like(v), "factor": square, "covariance": square}

    def client_init(self, me: ClientContext) -> Tree:
        v = _flat(self, me.model)
        return {"a": torch.diag(v[:, 0] * 0), "b": v * 0, "c": v.sum() * 0, "z": v[:, 0] * 0}

    def round(self, fed: Federation, server: Tree) -> Tree:
        size = len(ridge.as_vector(fed.model, fed.model.params))
        outputs = len(server["beta"]) // size
        is_intercept = torch.zeros_like(server["beta"][:size, 0], dtype=torch.bool)
        is_intercept[-1] = ridge.names(fed.model)[1] is not None
        varies = varying(fed.sum(fed.map(self.variation)), is_intercept)
        varies, is_intercept = varies.repeat(outputs), is_intercept.repeat(outputs)
        penalty = torch.where(is_intercept, 1e-6, self.penalty).to(server["beta"].dtype)
        best: tuple[float, reml.Fitted] | None = None
        for effects in AUTO if self.effects == "auto" else (self.effects,):
            (at,) = free_entries(effects, varies, is_intercept)
            tried = self.fit_effects(fed, server["beta"], server["factor"], penalty, at)
            if best is None or tried[0] < best[0]:
                best = tried
        assert best is not None
        fed.report(evidence=-best[0] / 2)
        fed.map(self.linearise, best[1].beta, best[1].factor)
        return {"beta": best[1].beta, "factor": best[1].factor, "covariance": best[1].covariance}

    def fit_effects(
        self, fed: Federation, beta: Tensor, factor: Tensor, penalty: Tensor, at: reml.Entries
    ) -> tuple[float, reml.Fitted]:
        """Schwarz's criterion of the Laplace approximation, and what was fitted."""
        problem = reml.Problem(
            sums=lambda factor: reml.Marginal(*fed.sum(fed.map(self.marginal, factor))),
            slopes=lambda *message: fed.sum(fed.map(self.slope, *message)),
            penalty=penalty,
            noise=1.0,
            widest=WIDEST,
        )
        if self.laplace and len(at[0]) and factor.any():  # where an earlier fit ended
            return self.judge(fed, self.refine(fed, *self.restart(fed, beta, factor, penalty, at)), penalty, at)
        fitted = None
        for step in range(self.steps):
            if step == 0 and not beta.any():
                fed.map(self.begin)
            else:
                fed.map(self.linearise, beta, factor)
            fitted = reml.fit(problem, at, factor, steps=8, restarts=2)
            moved = float((fitted.beta - beta).abs().max() + (fitted.factor - factor).abs().max())
            beta, factor = fitted.beta, fitted.factor
            if moved < 1e-4:
                break
        assert fitted is not None
        if self.laplace and len(at[0]):
            fitted = self.refine(fed, fitted, penalty, at, CLOSE)
        return self.judge(fed, fitted, penalty, at)

    def judge(
        self, fed: Federation, fitted: reml.Fitted, penalty: Tensor, at: reml.Entries
    ) -> tuple[float, reml.Fitted]:
        """Schwarz's criterion of what was fitted."""
        evidence = self.penalised(fed.sum(fed.map(self.evidence, fitted.beta, fitted.factor)), fitted.beta, penalty)
        return -2 * evidence + len(at[0]) * math.log(max(len(fed.cohort), 2)), fitted

    @staticmethod
    def penalised(evidence: Tensor, beta: Tensor, penalty: Tensor) -> float:
        return float(evidence) - float((penalty * beta[:, 0] ** 2).sum()) / 2

    def restart(
        self, fed: Federation, beta: Tensor, factor: Tensor, penalty: Tensor, at: reml.Entries
    ) -> tuple[reml.Fitted, Tensor, reml.Entries, float]:
        """From coefficients near the maximum, of these rows or of nearly all of them."""
        covariance = self.covariance(fed, beta, factor, penalty)
        start = reml.Fitted(factor, beta, torch.ones_like(beta[0, 0]), covariance, math.nan, len(at[0]), 0)
        return start, penalty, at, NEAR

    def covariance(self, fed: Federation, beta: Tensor, factor: Tensor, penalty: Tensor) -> Tensor:
        """Of beta, by the working responses at these coefficients."""
        fed.map(self.linearise, beta, factor)
        total = reml.Marginal(*fed.sum(fed.map(self.marginal, factor)))
        return torch.linalg.pinv(total.a + torch.diag(penalty), hermitian=True)

    def refine(
        self, fed: Federation, start: reml.Fitted, penalty: Tensor, at: reml.Entries, close: float
    ) -> reml.Fitted:
        """The maximum of Laplace's approximation near a start, by L-BFGS over beta and the factor together."""
        size, like = len(start.beta), start.beta
        rows, columns = (torch.from_numpy(np.ascontiguousarray(v)).to(like.device) for v in at)
        scale = torch.diagonal(start.covariance).clamp(min=1e-12).sqrt().double().cpu().numpy()

        def parts(theta: reml.Floats) -> tuple[Tensor, Tensor]:
            beta, factor = torch.from_numpy(scale * theta[:size]).to(like)[:, None], torch.zeros_like(start.factor)
            factor[rows, columns] = torch.from_numpy(np.ascontiguousarray(theta[size:])).to(like)
            return beta, factor

        def objective(theta: reml.Floats) -> tuple[float, reml.Floats]:
            beta, factor = parts(theta)
            evidence, by_beta, by_factor = fed.sum(fed.map(self.ascent, beta, factor))
            by_beta = by_beta[:, 0] - penalty * beta[:, 0]
            gradient = [scale * by_beta.double().cpu().numpy(), by_factor[rows, columns].double().cpu().numpy()]
            return -self.penalised(evidence, beta, penalty), -np.concatenate(gradient)

        first = np.concatenate(
            [start.beta[:, 0].double().cpu().numpy() / scale, start.factor[rows, columns].double().cpu().numpy()]
        )
        bounds = [(None, None)] * size + reml.limits(at, WIDEST)
        options = {"maxiter": self.laplace_steps, "ftol": close, "gtol": 1e8 * close}
        beta, factor = parts(minimize(objective, first, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x)
        covariance = self.covariance(fed, beta, factor, penalty)
        return reml.Fitted(factor, beta, start.noise, covariance, start.deviance, start.parameters, start.exchanges)

    @on_client(sends=WITHIN.summed())
    def variation(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, within(ridge.design_of(me.model, me.train), me.train.mask)

    @on_client()
    def begin(self, me: ClientContext) -> tuple[Tree, Tree]:
        x, v = ridge.design_of(me.model, me.train), _flat(self, me.model)
        a, b, c = self.family.start(x, me.train.y, me.train.mask, len(v) // x.shape[1])
        return {"a": a, "b": b, "c": c, "z": torch.zeros_like(v[:, 0])}, None

    @on_client()
    def linearise(self, me: ClientContext, beta: Tensor, factor: Tensor) -> tuple[Tree, Tree]:
        return self.working(me, beta, factor)[0], None

    @on_client(sends=NUMBER.summed())
    def evidence(self, me: ClientContext, beta: Tensor, factor: Tensor) -> tuple[Tree, Tree]:
        state, likelihood = self.working(me, beta, factor)
        _, logdet = reml.posterior(state["a"], factor)
        return state, likelihood - state["z"].square().sum() / 2 - logdet / 2

    @on_client(sends=(NUMBER.summed(), VECTOR.summed(), SQUARE.summed()))
    def ascent(self, me: ClientContext, beta: Tensor, factor: Tensor) -> tuple[Tree, Tree]:
        """Laplace's approximation at this client, and its gradient: the mode moves with beta and the factor."""
        x, (_, y, mask) = ridge.design_of(me.model, me.train), me.train
        outputs = beta.shape[0] // x.shape[1]
        steps = -(-self.newton // 2)  # the mode was near by, and the step below is one more
        settled = mode(self.family, x, y, mask, unflat(beta[:, 0], outputs), factor, me.state["z"], steps)

        def approximation(beta: Tensor, factor: Tensor) -> Tensor:
            common = unflat(beta[:, 0], outputs)
            # at the mode a Newton step is 0, and its derivative is that of the mode
            z = settled + newton_step(self.family, x, y, mask, common, factor, settled)
            own = common + unflat(factor @ z, outputs)
            _, curvature = self.family.derivatives(x, y, mask, own)
            _, logdet = reml.posterior(curvature, factor)
            return self.family.log_likelihood(x, y, mask, own) - z.square().sum() / 2 - logdet / 2

        (by_beta, by_factor), value = torch.func.grad_and_value(approximation, argnums=(0, 1))(beta, factor)
        return me.state | {"z": settled}, (value, by_beta, by_factor)

    def working(self, me: ClientContext, beta: Tensor, factor: Tensor) -> tuple[Tree, Tensor]:
        """Normal equations of the working response at the client's mode, and the log-likelihood there."""
        x, (_, y, mask) = ridge.design_of(me.model, me.train), me.train
        common = unflat(beta[:, 0], beta.shape[0] // x.shape[1])
        z = mode(self.family, x, y, mask, common, factor, me.state["z"], self.newton)
        v = beta + (factor @ z)[:, None]
        own = unflat(v[:, 0], common.shape[1])
        gradient, curvature = self.family.derivatives(x, y, mask, own)
        b = curvature @ v + gradient[:, None]
        c = (v * (b + gradient[:, None])).sum()
        return {"a": curvature, "b": b, "c": c, "z": z}, self.family.log_likelihood(x, y, mask, own)

    @on_client(sends=(SQUARE.summed(), VECTOR.summed(), *3 * (NUMBER.summed(),)), doubt=doubts.of_working_marginal)
    def marginal(self, me: ClientContext, factor: Tensor) -> tuple[Tree, Tree]:
        d = me.state
        return d, tuple(reml.marginal(d["a"], d["b"], d["c"], me.n.to(d["c"].dtype), factor))

    @on_client(sends=(SQUARE.summed(), SQUARE.summed()), doubt=doubts.of_squares)
    def slope(self, me: ClientContext, factor: Tensor, beta: Tensor, inverse: Tensor) -> tuple[Tree, Tree]:
        return me.state, reml.slope(me.state["a"], me.state["b"], factor, beta, inverse)

    def personal(self, me: ClientContext, server: Tree) -> Params:
        beta, factor, x = server["beta"], server["factor"], ridge.design_of(me.model, me.train)
        common, start = unflat(beta[:, 0], beta.shape[0] // x.shape[1]), torch.zeros_like(beta[:, 0])
        z = mode(self.family, x, me.train.y, me.train.mask, common, factor, start, 2 * self.newton)
        own = common + unflat(factor @ z, common.shape[1])
        return ridge.as_params(me.model, torch.cat([torch.zeros_like(own[:, :1])] * self.fixed + [own], dim=1))
