"""Learn2pFed: learns how much of each parameter each client shares. Lv et al., 2024, Algorithm 1.

Unrolled ADMM with learned numbers, for linear models, with the v-step in closed form: equations (9) to (12). Symbols:
w common model; v own model; z = v - w; a scaled dual; lam degree of collaboration (Lambda); p, gamma weights of (12);
theta, rho, eta steps of (9), (10), (11). The penalty is rho |.|^2, for which (10) and (11) are exact. The cells' fixed
point has Lambda_eff = rho / eta * lam, and that is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared import learnables
from fedtailor.algorithms._shared.fused_cells import fused_epoch
from fedtailor.algorithms._shared.random_coefficients import VECTOR
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext, View
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import ridge

DEGREES = ReplySpec(
    "degrees", lambda algorithm, model: learnables.degrees(algorithm.server_init(model)["common"]["raw"])
)


@dataclass(frozen=True)
class Learn2pFed(learnables.Learnables, Algorithm):
    """Unrolled ADMM whose degrees are learned by the error of every sample predicted without it."""

    title: ClassVar[str] = "Learn2pFed"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "model, degrees, steps"
    onboards_fitted: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"outer": "train", "pull": 0.0, "positive": "relu", "lam": 5e-4, "rho": 0.01, "theta": 0.01}
        | {
            "optimizer": "sgd",
            "outer_lr": 0.01,
            "serve": "unrolled",
            "reach": 0.0,
            "learned": ("lam", *learnables.SCALARS),
        }
    }
    citation: ClassVar[str] = """@article{lv2024learn,
  title={Learn What You Need in Personalized Federated Learning},
  author={Lv, Kexin and Ye, Rui and Huang, Xiaolin and Yang, Jie and Chen, Siheng},
  year={2024}
}"""

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

    def check(self, model: Model, task: str) -> None:
        ridge.check(model, task)

    def server_init(self, model: Model) -> Tree:
        w = ridge.as_vector(model, model.params)
        return {"w": w, "common": self.first_numbers(w)}

    def client_init(self, me: ClientContext) -> Tree:
        v = ridge.as_vector(me.model, me.model.params)
        data = {"d": ridge.statistics(me.model, me.train)}
        data |= {"held": ridge.moments(me.model, me.val)} if self.outer == "holdout" else {}
        return data | {"v": v, "z": v - v, "a": v - v, "learned": self.first_numbers(v)}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        s = self.client_init(me)
        s["learned"]["raw"] = learnables.pull_degrees(
            s["learned"]["raw"], learnables.degrees(server["common"]["raw"]), 1.0
        )
        v = ridge.shrunk(self.evidence(s), self.roots_of(s, server), server["w"])
        return s | {"v": v, "z": v - server["w"]}

    def round(self, fed: Federation, server: Tree) -> Tree:
        return fed.fused_round(self.stacked_epoch, server) or self.epoch(fed, server)

    def stacked_epoch(self, states: Tree, server: Tree, samples: Callable[[], View]) -> Any:
        """`epoch` for all clients at once."""
        return None if self.diagnostics else fused_epoch(self, states, server, samples)

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
            fed.report(**diagnoses_by_name(diagnoses), outer_loss=loss.detach(), gradient_norm=slope)
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

    @on_client(sends=(NUMBER.summed(), NUMBER.summed(), NUMBER.summed()))
    def diagnose(self, me: ClientContext, w: Tensor, before: Tensor, cell: Tensor) -> tuple[Tree, Tree]:
        """This client's part of the augmented Lagrangian with the penalty rho |.|^2, and its squared residuals."""
        s = me.state
        x = self.numbers(s, w, cell)
        lam = x["rho"] / x["eta"] * x["lam"]
        off, dual = s["v"] - w - s["z"], s["a"]
        coupled = (lam * s["z"].square()).sum() + (x["rho"] * ((off - dual).square() - dual.square())).sum()
        value = x["p"].squeeze() * (ridge.squared_error(s["d"], s["v"]) + coupled)
        return s, (value, off.square().sum(), (x["rho"] * (w - before)).square().sum())

    @on_client(sends=NUMBER.summed())
    def slope(self, me: ClientContext) -> tuple[Tree, Tree]:
        """Squared norm of the gradient of the outer loss by this client's numbers."""
        return me.state, me.grad["learned"]["raw"].square().sum()

    @on_client(sends=DEGREES.summed())
    def learn(self, me: ClientContext) -> tuple[Tree, Tree]:
        gradient = me.grad["learned"]["raw"]
        learned = self.step(me.state["learned"], gradient)
        return me.state | {"learned": learned}, learnables.degrees(gradient if self.pull else learned["raw"])

    @on_client()
    def agree(self, me: ClientContext, common: Tensor) -> tuple[Tree, Tree]:
        learned = me.state["learned"]
        return me.state | {
            "learned": learned | {"raw": learnables.pull_degrees(learned["raw"], common, self.pull)}
        }, None

    def roots_of(self, state: Tree, server: Tree) -> Tensor:
        """Lambda_eff^(-1/2) of each parameter: 0 is the common one, infinity the client's own."""
        x = self.numbers(state, server["w"], -1)
        return (x["eta"] / (x["rho"] * x["lam"]).clamp(min=1e-12)).sqrt()

    def evidence(self, state: Tree) -> Params:
        """What the served model is fitted to: all samples, once the held-out ones have done their work."""
        return {k: state["d"][k] + state["held"][k] for k in ("A", "b")} if self.outer == "holdout" else state["d"]

    def personal(self, me: ClientContext, server: Tree) -> Params:
        if self.serve == "unrolled":
            return ridge.as_params(me.model, me.state["v"])
        return ridge.as_params(
            me.model, ridge.shrunk(self.evidence(me.state), self.roots_of(me.state, server), server["w"])
        )

    def shares(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, ridge.share(self.evidence(me.state), self.roots_of(me.state, server)))

    def effective_degrees(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, self.roots_of(me.state, server) ** -2)


def diagnoses_by_name(cells: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, list[Tensor]]:
    """Sums over clients of what `diagnose` found in each cell, by their names in reports."""
    lagrangian, primal, dual = map(list, zip(*cells, strict=True))
    residuals = {"primal_residual": [p.sqrt() for p in primal], "dual_residual": [d.sqrt() for d in dual]}
    return {"augmented_lagrangian": lagrangian} | residuals
