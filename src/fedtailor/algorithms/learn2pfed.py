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

from torch import Tensor

from fedtailor.algorithms._shared import learnables
from fedtailor.algorithms._shared.fused_cells import fused_epoch
from fedtailor.algorithms._shared.random_coefficients import VECTOR
from fedtailor.algorithms._shared.unrolled_cells import UnrolledCells
from fedtailor.core.algorithm import NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext, View
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge

TRAINING_LOSS = {"outer": "train", "pull": 0.0, "learned": ("lam", *learnables.SCALARS), "reach": 0.0}
DESCENT = {"optimizer": "sgd", "outer_lr": 0.01}
UNROLLED: dict[str, Any] = (  # what presets have in common
    {"serve": "unrolled", "positive": "relu", "random_lam": True, "weights": "samples", "lower_after": 60}
    | TRAINING_LOSS
    | DESCENT
)


@dataclass(frozen=True)
class Learn2pFed(UnrolledCells, Algorithm):  # type: ignore[override]  # counts_all
    """Unrolled ADMM whose degrees are learned by the error of every sample predicted without it."""

    title: ClassVar[str] = "Learn2pFed"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "model, degrees, steps"
    onboards_fitted: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": UNROLLED
        | {"start": "fixed", "per_cell": True, "sum_loss": True, "lam": 0.2, "rho": 0.15, "theta": 0.15},
        "released": UNROLLED | {"start": "drawn", "lam": 0.001, "rho": 0.01, "theta": 0.01},
        "warm": UNROLLED
        | {"lam": 5e-4, "rho": 0.01, "theta": 0.01, "random_lam": False, "weights": "equal", "lower_after": 0},
    }
    citation: ClassVar[str] = """@article{lv2024learn,
  title={Learn What You Need in Personalized Federated Learning},
  author={Lv, Kexin and Ye, Rui and Huang, Xiaolin and Yang, Jie and Chen, Siheng},
  year={2024}
}"""

    outer: Literal["loo", "holdout", "train"] = "loo"
    """Loss that degrees are learned from: leave-one-out, validation, or training error (paper)."""
    serve: Literal["solved", "unrolled"] = "solved"
    """Predict with the exact v for the learned degrees, or with v of the last cell (paper)."""
    diagnostics: bool = False
    """Report the augmented Lagrangian and residuals of every cell, and gradient norms; two more trips per cell."""

    def check(self, model: Model, task: str) -> None:
        ridge.check(model, task)
        self.check_options()

    def server_init(self, model: Model) -> Tree:
        w = ridge.as_vector(model, model.params)
        return {"w": w, "common": self.first_numbers(w)}

    def client_init(self, me: ClientContext) -> Tree:
        v = ridge.as_vector(me.model, me.model.params)
        data = {"d": ridge.statistics(me.model, me.train)}
        data |= {"held": ridge.moments(me.model, me.val)} if self.outer == "holdout" else {}
        return data | self.first_state(me, v)

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        s = self.client_init(me)
        s["learned"]["raw"] = learnables.pull_degrees(
            s["learned"]["raw"], learnables.degrees(server["common"]["raw"]), 1.0
        )
        v = ridge.shrunk(self.evidence(s), self.roots_of(s, server), server["w"])
        return s | {"v": v, "z": v - server["w"]}

    def round(self, fed: Federation, server: Tree) -> Tree:
        server = self.begin_epoch(fed, server)
        return fed.fused_round(self.stacked_epoch, server) or self.epoch(fed, server)

    def stacked_epoch(self, states: Tree, server: Tree, samples: Callable[[], View]) -> Any:
        """`epoch` for all clients at once."""
        return None if self.diagnostics else fused_epoch(self, states, server, samples)

    def epoch(self, fed: Federation, server: Tree) -> Tree:
        fed.tape()
        w, diagnoses = server["w"], []
        for cell, after in enumerate(self.run_cells(fed, w)):
            if self.diagnostics:
                diagnoses.append(fed.sum(fed.map_untaped(self.diagnose, after, w, fed.places([cell])[0])))
            w = after
        loss = self.mean_outer_loss(fed, w)
        common = self.learn_from(fed, server, loss)
        if self.diagnostics:
            norm = fed.sum(fed.map(self.slope)).sqrt()
            fed.report(**diagnoses_by_name(diagnoses), outer_loss=loss.detach(), gradient_norm=norm)
        return server | {"w": w, "common": common}

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
