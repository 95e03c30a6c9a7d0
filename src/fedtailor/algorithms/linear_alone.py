"""LinearAlone: every client solves its own ridge, logistic or Poisson regression, with a penalty by leave-one-out.

Hoerl, Kennard, Technometrics 12, 1970; leave-one-out errors in closed form: Golub, Heath, Wahba, Technometrics 21,
1979, and for classes and counts by one Newton step: Rad, Maleki, J. R. Stat. Soc. B 82, 2020. The line that sharing
has to beat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.core.algorithm import Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge
from fedtailor.numerics.counts import POISSON
from fedtailor.numerics.eigen import eigen
from fedtailor.numerics.logits import LOGIT
from fedtailor.numerics.newton import Family, flat, penalised

WEAKEST = 0.1  # penalty for classes and counts: without any, a few rows of one class make it certain


@dataclass(frozen=True)
class LinearAlone(Algorithm):
    """Nothing is sent."""

    penalties: tuple[float, ...] = (1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 1e5)
    """Ridge penalties to choose from."""

    intercept: float = 0.3
    """Penalty on the intercepts of classes and counts, so that what a client has not seen is not impossible."""

    newton: int = 8
    """Newton steps per penalty, for classes and counts."""

    title: ClassVar[str] = "LinearAlone"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the whole model"
    onboards_fitted: ClassVar[bool] = True
    citation: ClassVar[str] = """@article{hoerl1970ridge,
  title={Ridge Regression: Biased Estimation for Nonorthogonal Problems},
  author={Hoerl, Arthur E. and Kennard, Robert W.},
  journal={Technometrics}, volume={12}, number={1}, year={1970}
}"""

    def check(self, model: Model, task: str) -> None:
        ridge.names(model)

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    def onboard_init(self, me: ClientContext, server: Tree) -> Params:
        return self.choose_fit(me)

    @on_client()
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        return self.choose_fit(me), None

    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.map(self.local)
        return server

    def choose_fit(self, me: ClientContext) -> Params:
        x, (_, y, mask) = ridge.design_of(me.model, me.train), me.train
        has_bias = ridge.names(me.model)[1] is not None
        start = torch.zeros_like(ridge.as_vector(me.model, me.model.params))
        if y.is_floating_point():
            solved = self.numbers(x, y, mask, has_bias)
        elif y.dim() == 1:
            chosen = self.choose_penalised(LOGIT, x, y, mask, torch.zeros_like(start[:, 1:]))
            solved = torch.cat([torch.zeros_like(chosen[:, :1]), chosen], dim=1)
        else:
            level = ((y * mask[:, None]).sum(0) + 0.5).log() - mask.sum().clamp(min=1).log()  # also of none at all
            center = torch.cat([start[:-1], level[None]]) if has_bias else start
            solved = self.choose_penalised(POISSON, x, y, mask, center)
        return ridge.as_params(me.model, solved)

    def numbers(self, x: Tensor, y: Tensor, mask: Tensor, has_bias: bool) -> Tensor:
        """[features (+ 1), outputs]"""
        return self.numbers_and_errors(x, y, mask, has_bias)[0]

    def numbers_and_errors(self, x: Tensor, y: Tensor, mask: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
        """The same, and the squared errors of rows that are left out [rows, outputs]."""
        count, share = mask.sum().clamp(min=1), mask[:, None]
        y = y * share
        center, level = (x.sum(0) / count, y.sum(0) / count) if has_bias else (x[0] * 0, y[0] * 0)
        x, y = (x - center) * share, (y - level) * share
        if len(x) < x.shape[1]:  # fewer rows than features: the same by the matrix of rows
            s, u = eigen(x @ x.mT)
            s = s.clamp(min=0)
            xq, q, b = u * s.sqrt(), x.mT @ u, u.mT @ y
        else:
            s, q = eigen(x.mT @ x)
            s, xq, b = s.clamp(min=0), x @ q, q.mT @ (x.mT @ y)
        tried, errors = [], []
        for penalty in self.penalties:
            v = b / (s + penalty)[:, None]
            leverage = (xq.square() / (s + penalty)).sum(1, keepdim=True) + (1 / count if has_bias else 0)
            rest = (y - xq @ v) / (1 - leverage).clamp(min=1e-3)
            tried.append(q @ v)
            errors.append(rest.square() * share)
        scores = -torch.stack(errors).sum((1, 2))
        v, error = _best_of(tried, scores), _best_of(errors, scores)
        return (torch.cat([v[:-1], (level - center[:-1] @ v[:-1])[None]]) if has_bias else v), error

    def choose_penalised(self, family: Family, x: Tensor, y: Tensor, mask: Tensor, center: Tensor) -> Tensor:
        """[features (+ 1), outputs] near a center, from strong penalties to weak ones."""
        v, tried, scores = center, [], []
        for penalty in sorted((p for p in self.penalties if p >= WEAKEST), reverse=True):
            by_feature = torch.full_like(v, penalty)
            # a column of ones is the intercept
            constant = ((x - mask[:, None]).abs().sum(0) == 0)[:, None]
            by_coefficient = flat(torch.where(constant, self.intercept, by_feature))
            v = penalised(family, x, y, mask, by_coefficient, v, self.newton, center)
            tried.append(v)
            scores.append(family.left_out(x, y, mask, by_coefficient, v))
        return _best_of(tried, _nearly_best(torch.stack(scores), mask))

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state


def _nearly_best(scores: Tensor, mask: Tensor) -> Tensor:
    """1 at the first (strongest) penalty that is within half a standard error of the best, from scores by row."""
    best = torch.nn.functional.one_hot(scores.sum(1).argmax(), len(scores)).to(scores.dtype)
    lost = ((best[:, None] * scores).sum(0) - scores) * mask
    count = mask.sum().clamp(min=1)
    spread = (lost - lost.sum(1, keepdim=True) / count).square() * mask
    is_near = lost.sum(1) <= 0.5 * spread.sum(1).sqrt()
    return torch.where(is_near, torch.arange(len(scores), 0, -1, dtype=scores.dtype, device=scores.device), 0)


def _best_of(tried: list[Tensor], scores: Tensor) -> Tensor:
    best = torch.nn.functional.one_hot(scores.argmax(), len(tried)).to(tried[0].dtype)
    return (best[:, None, None] * torch.stack(tried)).sum(0)
