"""Learn2pFed: learns how much of each parameter each client shares. Lv et al., 2024, Algorithm 1.

For linear models, with the v-step in closed form. Symbols as in unrolled_admm.py, where the cells are: w common model;
v own model; z = v - w. The cells' fixed point has Lambda_eff = rho / eta * lam, and that is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedtailor.algorithms._shared import learnables
from fedtailor.algorithms._shared.unrolled_admm import UnrolledADMM
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge


@dataclass(frozen=True)
class Learn2pFed(UnrolledADMM):
    """Unrolled ADMM whose degrees are learned by the error of every sample predicted without it."""

    title: ClassVar[str] = "Learn2pFed"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "model, degrees, steps"
    onboards_fitted: ClassVar[bool] = True
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
        s["learned"]["raw"] = learnables.pulled(s["learned"]["raw"], learnables.degrees(server["common"]["raw"]), 1.0)
        v = ridge.shrunk(self.evidence(s), self.roots_of(s, server), server["w"])
        return s | {"v": v, "z": v - server["w"]}

    def round(self, fed: Federation, server: Tree) -> Tree:
        return fed.fused_round(self.stacked_states, server) or self.epoch(fed, server)

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
