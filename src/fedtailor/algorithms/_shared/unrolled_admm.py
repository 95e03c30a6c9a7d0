"""Unrolled ADMM with learned numbers, for linear models. Lv et al., 2024, equations (9) to (12).

Symbols: w common model; v own model; z = v - w; a scaled dual; lam degree of collaboration (Lambda); p, gamma weights
of (12); theta, rho, eta steps of (9), (10), (11). The penalty is rho |.|^2, for which (10) and (11) are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared import learnables, unrolled
from fedtailor.algorithms._shared.random_coefficients import VECTOR
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext, View
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import ridge

DEGREES = ReplySpec(
    "degrees", lambda algorithm, model: learnables.degrees(algorithm.server_init(model)["common"]["raw"])
)


@dataclass(frozen=True)
class UnrolledADMM(learnables.Learnables, Algorithm, ABC):
    """An outer epoch: the cells forward, the gradient of the outer loss back, a step of the learned numbers."""

    outer: Literal["loo", "holdout", "train"] = "loo"
    """Loss that degrees are learned from: leave-one-out, validation, or training error (paper)."""
    pull: float = 1.0
    """Degrees: 0 private, 1 common to all; in between, private and pulled towards the common ones."""
    serve: Literal["solved", "unrolled"] = "solved"
    """Predict with the exact v for the learned degrees, or with v of the last cell (paper)."""
    gradient: Literal["exact", "local"] = "exact"
    """Differentiate through the whole federation, or treat the common model as constant."""
    diagnostics: bool = False
    """Report the augmented Lagrangian and residuals of every cell, and gradient norms; two more trips per cell."""

    def epoch(self, fed: Federation, server: Tree) -> Tree:
        fed.tape()
        w, diagnoses = server["w"], []
        for cell in range(self.cells):
            before = w
            top, bottom = fed.map(self.cell, w, fed.places([cell])[0])
            w = fed.sum(top) / fed.sum(bottom)  # (12)
            w = w if self.gradient == "exact" else w.detach()
            diagnoses += (
                [fed.sum(fed.map_untaped(self.diagnose, w, before, fed.places([cell])[0]))] if self.diagnostics else []
            )
        wrong, count = fed.map(self.outer_loss, w)
        if fed.sum(count) == 0:
            raise ConfigError('algorithm.outer = "holdout": no client has validation samples; raise data.val')
        loss = fed.sum(wrong) / fed.sum(count)
        fed.backward(loss)
        if self.diagnostics:
            slope = fed.sum(fed.map(self.slope)).sqrt()
            fed.report(**unrolled.reported_diagnoses(diagnoses), outer_loss=loss.detach(), gradient_norm=slope)
        replies = fed.map(self.learn)
        common = self.common_step(server["common"], fed.sum(replies) if self.pull else fed.mean(replies))
        if self.pull:
            fed.map(self.agree, learnables.degrees(common["raw"]))
        return server | {"w": w, "common": common}

    def common_step(self, common: Tree, replies: Tensor) -> Tree:
        """The common degrees after one step on the clients' summed gradient; without a pull they are the mean ones."""
        scalars = common["raw"][..., -len(learnables.SCALARS) :]
        if self.pull:
            return self.step(common, torch.cat([replies, torch.zeros_like(scalars)], dim=-1))
        return common | {"raw": torch.cat([replies, scalars], dim=-1)}

    @on_client(sends=(VECTOR.summed(), NUMBER.summed()))
    def cell(self, me: ClientContext, w: Tensor, cell: Tensor) -> tuple[Tree, Tree]:
        s = me.state
        x = self.numbers(s, w, cell)
        a = s["a"] + x["theta"] * (s["z"] - s["v"] + w)  # (9)
        v = ridge.ridge(s["d"], x["rho"], w + s["z"] + a)  # (10)
        z = x["eta"] / (x["lam"] + x["eta"]) * (v - w - a)  # (11)
        c = x["p"] * x["gamma"]
        return s | {"v": v, "z": z, "a": a}, (c * (v - z - a), c.squeeze())

    @on_client(sends=(NUMBER.summed(), NUMBER.summed()))
    def outer_loss(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
        s = me.state
        data = s["held"] if self.outer == "holdout" else s["d"]
        if self.judges_served:
            return s, (self.served_error(s, me.train if self.outer == "loo" else None, w), data["n"])
        return s, (ridge.squared_error(data, s["v"]), data["n"])

    @property
    def judges_served(self) -> bool:
        """Whether the outer loss is that of the model that predicts, not of the last cell's."""
        return self.outer == "loo" or (self.outer == "holdout" and self.serve == "solved")

    def served_error(self, s: Tree, samples: View | None, w: Tensor) -> Tensor:
        """Squared errors of the served model: each of `samples` predicted without it, or those held out."""
        r = self.roots_of(s, {"w": w})
        if samples is not None:
            return ridge.left_out_error(samples, s["d"], r, w)
        return ridge.squared_error(s["held"], ridge.shrunk(s["d"], r, w))

    at_once: ClassVar[bool] = True
    diagnose: ClassVar[Any] = unrolled.diagnose
    slope: ClassVar[Any] = unrolled.slope

    @on_client(sends=DEGREES.summed())
    def learn(self, me: ClientContext) -> tuple[Tree, Tree]:
        gradient = me.grad["learned"]["raw"]
        learned = self.step(me.state["learned"], gradient)
        return me.state | {"learned": learned}, learnables.degrees(gradient if self.pull else learned["raw"])

    @on_client()
    def agree(self, me: ClientContext, common: Tensor) -> tuple[Tree, Tree]:
        learned = me.state["learned"]
        return me.state | {"learned": learned | {"raw": learnables.pulled(learned["raw"], common, self.pull)}}, None

    def stacked_states(self, states: Tree, server: Tree, samples: Callable[[], View]) -> Any:
        """`epoch` for all clients at once."""
        return None if self.diagnostics else unrolled.at_once(self, states, server, samples)

    @abstractmethod
    def roots_of(self, state: Tree, server: Tree) -> Tensor:
        """Lambda_eff^(-1/2) of each parameter: 0 is the common one, infinity the client's own."""
