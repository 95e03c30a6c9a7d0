"""Unrolled ADMM with learned numbers, for linear models. Lv et al., 2024, equations (9) to (12).

Symbols: w common model; v own model; z = v - w; a scaled dual; lam degree of collaboration (Lambda); p, gamma weights
of (12); theta, rho, eta steps of (9), (10), (11). The penalty is rho |.|^2, for which (10) and (11) are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedtailor.algorithms._shared import learnables, unrolled
from fedtailor.algorithms.empirical_bayes import VECTOR
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import ridge

DEGREES = ReplySpec("degrees", lambda algorithm, model: algorithm.server_init(model)["degrees"])


@dataclass(frozen=True)
class UnrolledADMM(learnables.Learnables, Algorithm, ABC):
    """An outer epoch: the cells forward, the gradient of the outer loss back, a step of the learned numbers."""

    outer: Literal["eb", "loo", "holdout", "train"] = "eb"
    """What degrees are learned by: empirical Bayes, leave-one-out, validation error, or training error (paper)."""
    pull: float = 1.0
    """Degrees of a client: 0 its own, 1 common to all, between them a common part and a deviation of its own."""
    gradient: Literal["exact", "local"] = "exact"
    """Through the whole federation, or with the common model taken as constant."""
    diagnostics: bool = False
    """Report the augmented Lagrangian and residuals of every cell, and gradient norms; costs two more trips a cell."""

    def epoch(self, fed: Federation, server: Tree) -> Tree:
        fed.tape()
        w, told = server["w"], []
        for cell in range(self.cells):
            before = w
            top, bottom = fed.map(self.cell, w, fed.places([cell])[0])
            w = fed.sum(top) / fed.sum(bottom)  # (12)
            w = w if self.gradient == "exact" else w.detach()
            told += (
                [fed.sum(fed.map_untaped(self.diagnose, w, before, fed.places([cell])[0]))] if self.diagnostics else []
            )
        wrong, count = fed.map(self.outer_loss, w)
        if fed.sum(count) == 0:
            raise ConfigError('algorithm.outer = "holdout": no client has validation samples; raise data.val')
        loss = fed.sum(wrong) / fed.sum(count)
        fed.backward(loss)
        if self.diagnostics:
            slope = fed.sum(fed.map(self.slope)).sqrt()
            fed.report(**unrolled.told(told), outer_loss=loss.detach(), gradient_norm=slope)
        degrees = fed.mean(fed.map(self.learn))
        if self.pull:
            fed.map(self.agree, degrees)
        return server | {"w": w, "degrees": degrees}

    @on_client(sends=(VECTOR, NUMBER))
    def cell(self, me: ClientContext, w: Tensor, cell: Tensor) -> tuple[Tree, Tree]:
        s = me.state
        x = self.numbers(s, w, cell)
        a = s["a"] + x["theta"] * (s["z"] - s["v"] + w)  # (9)
        v = ridge.ridge(s["d"], x["rho"], w + s["z"] + a)  # (10)
        z = x["eta"] / (x["lam"] + x["eta"]) * (v - w - a)  # (11)
        c = x["p"] * x["gamma"]
        return s | {"v": v, "z": z, "a": a}, (c * (v - z - a), c.squeeze())

    @on_client(sends=(NUMBER, NUMBER))
    def outer_loss(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
        s = me.state
        if self.outer == "loo":
            return s, (ridge.left_out_error(me.model, me.train, s["d"], self.roots_of(s, {"w": w}), w), me.n)
        data = s["held"] if self.outer == "holdout" else s["d"]
        return s, (ridge.squared_error(data, s["v"]), data["n"])

    at_once: ClassVar[bool] = True
    diagnose: ClassVar[Any] = unrolled.diagnose
    slope: ClassVar[Any] = unrolled.slope

    @on_client(sends=DEGREES)
    def learn(self, me: ClientContext) -> tuple[Tree, Tree]:
        learned = self.step(me.state["learned"], me.grad["learned"]["raw"])
        return me.state | {"learned": learned}, learnables.degrees(learned["raw"])

    @on_client()
    def agree(self, me: ClientContext, mean: Tensor) -> tuple[Tree, Tree]:
        learned = me.state["learned"]
        return me.state | {"learned": learned | {"raw": learnables.pulled(learned["raw"], mean, self.pull)}}, None

    def stacked_states(self, states: Tree, server: Tree) -> Any:
        """`epoch` for all clients at once; leave-one-out has no closed-form adjoint."""
        return None if self.outer == "loo" or self.diagnostics else unrolled.at_once(self, states, server)

    @abstractmethod
    def roots_of(self, state: Tree, server: Tree) -> Tensor:
        """Lambda_eff^(-1/2) of each parameter: 0 is the common one, infinity the client's own."""
