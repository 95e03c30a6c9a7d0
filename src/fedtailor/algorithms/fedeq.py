"""FeDEQ: a representation shared by consensus ADMM, a personal head. Le et al., 2024, Algorithm 1.

Symbols: theta common representation; theta_i own copy; w_i head; u_i = lambda_i / rho scaled dual, whose step is 1. The
model may be any; with equilibrium layers (such as deq-mlp) it is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import BODY, COUNT, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, unflat
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class FeDEQ(Algorithm):
    """Each client minimises F(theta_i, w_i) + <lambda_i, theta_i - theta> + rho/2 |theta_i - theta|^2."""

    epochs: int = 5
    """Local epochs of the representation."""
    phases: Literal["alternate", "joint"] = "alternate"
    """Train the head before the representation (paper), or together with it."""
    head_epochs: int = 3
    """Local epochs of the head in its own phase."""
    rho: float = 0.01
    """ADMM penalty; 0 is FedRep, or with a joint phase FedPer."""
    average: Literal["plain", "exact"] = "plain"
    """What is averaged: theta_i (paper), or theta_i + u_i, which minimises the Lagrangian but needs a large rho."""
    start: Literal["common", "own", "recent"] = "common"
    """Start of theta_i: theta, its last value (paper), or its last value if from the last round, else theta."""
    head_on: Literal["common", "start"] = "common"
    """Body under which the head is trained: theta (paper), or the initial theta_i."""
    mean: Literal["samples", "clients"] = "samples"
    """Weight clients by their samples, or equally."""
    serve: Literal["common", "own"] = "common"
    """Predict with the common representation, or with the client's own (paper)."""
    dual_start: float = 0.0
    """The initial lambda is uniform in [-dual_start, dual_start]."""
    diagnostics: bool = False
    """Report augmented Lagrangian, consensus residual and dual norm of the round's clients; costs one more trip."""

    title: ClassVar[str] = "FeDEQ"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "head"
    private: ClassVar[str] = "head, own representation, dual"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "rho = 0": ({"rho": 0.0, "epochs": 3, "head_epochs": 2}, "fedrep", {"body_epochs": 3, "head_epochs": 2}),
        "rho = 0, jointly": ({"rho": 0.0, "epochs": 3, "phases": "joint"}, "fedper", {"epochs": 3}),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"start": "own", "mean": "clients", "serve": "own", "dual_start": 0.01},
        "released": {"start": "recent", "head_on": "start", "serve": "own"},
    }
    citation: ClassVar[str] = """@article{le2024federated,
  title={Federated Deep Equilibrium Learning: Harnessing Compact Global Representations to Enhance Personalization},
  author={Le, Long Tan and Nguyen, Tuan Dung and Nguyen, Tung-Anh and Hong, Choong Seon and Seneviratne, Suranga and
    Bao, Wei and Tran, Nguyen H.},
  year={2024}
}"""

    server_init, shares = FedRep.server_init, FedRep.shares

    def check(self, model: Model, task: str) -> None:
        if self.rho < 0 or (self.rho == 0 and self.dual_start):
            raise ConfigError("algorithm.rho: FeDEQ needs rho of at least 0, and above 0 for a dual that is not 0")

    def client_init(self, me: ClientContext) -> Tree:
        u = {k: torch.zeros_like(v) for k, v in me.model.body.items() if k in me.model.trainable}  # not statistics
        if self.dual_start:
            u = unflat((2 * me.uniform(sum(v.numel() for v in u.values())) - 1) * self.dual_start / self.rho, u)
        never = torch.full_like(me.n, -2, dtype=torch.int64)
        return {"theta": me.model.body, "w": me.model.head, "u": u, "round": never}

    def onboard_init(self, me: ClientContext, theta: Params) -> Tree:
        return self.client_init(me) | {"theta": theta}

    @on_client(sends=(BODY.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, theta: Params) -> tuple[Tree, Tree]:
        s, w = me.state, me.state["w"]
        begun = theta if self.start == "common" else s["theta"]
        if self.start == "recent":
            begun = {k: torch.where(s["round"] == me.round - 1, v, theta[k]) for k, v in begun.items()}
        center = {k: theta[k] - u for k, u in s["u"].items()}
        if self.phases == "alternate":
            w = me.sgd(w, epochs=self.head_epochs, frozen=theta if self.head_on == "common" else begun)  # line 8
            theta_i = me.sgd(begun, epochs=self.epochs, frozen=w, prox=(center, self.rho))  # line 9
        else:
            both = me.sgd(begun | w, epochs=self.epochs, prox=(center, self.rho))  # lines 8 and 9 in one
            theta_i, w = {k: both[k] for k in theta}, {k: both[k] for k in w}
        u = {k: u + theta_i[k] - theta[k] for k, u in s["u"].items()}  # line 10
        sent = theta_i | {k: theta_i[k] + v for k, v in u.items()} if self.average == "exact" else theta_i
        n = me.n if self.mean == "samples" else torch.ones_like(me.n)
        return {"theta": theta_i, "w": w, "u": u, "round": torch.full_like(s["round"], me.round)}, (sent, n)

    @on_client(sends=(NUMBER.summed(), NUMBER.summed(), NUMBER.summed()))
    def diagnose(self, me: ClientContext, theta: Params) -> tuple[Tree, Tree]:
        s, u = me.state, me.state["u"]
        apart = {k: s["theta"][k] - theta[k] for k in u}
        lagrangian = me.loss(s["theta"] | s["w"]) + self.rho * (dot(u, apart) + dot(apart, apart) / 2)  # (5)
        return s, (lagrangian, dot(apart, apart), dot(u, u))

    def round(self, fed: Federation, theta: Params) -> Params:
        mean = fed.mean(*fed.map(self.local, theta))  # line 4, of the next round
        if self.diagnostics:
            lagrangian, residual, dual = fed.map(self.diagnose, theta)
            fed.report(augmented_lagrangian=fed.sum(lagrangian), consensus_residual=fed.sum(residual).sqrt())
            fed.report(dual_norm=self.rho * fed.sum(dual).sqrt())
        return mean

    def personal(self, me: ClientContext, theta: Params) -> Params:
        return (theta if self.serve == "common" else me.state["theta"]) | me.state["w"]


def dot(a: Params, b: Params) -> Any:
    return sum((v * b[k]).sum() for k, v in a.items())
