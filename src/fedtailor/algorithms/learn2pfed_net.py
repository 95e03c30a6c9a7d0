"""Learn2pFed-Net: degrees for all parameters of a network, one ADMM step per round. After Lv et al., 2024.

A variant of ours; the paper's cells for networks are in learn2pfed_head.py. The v-step is local epochs, the dual step
is 1, clients are weighted by n_i, and w is a constant in the gradient of log lam, by the loss of w + z. Symbols: w
common model; v own model; z = v - w; a scaled dual; lam degree of collaboration; s = lam / (lam + eta) the share of
the common model. Served is the shrunk model w + z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedtailor.algorithms._shared import degrees
from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.core.algorithm import COUNT, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map

SHARED = ReplySpec("shared part", lambda algorithm, model: algorithm.part_sent(model), is_model=True)
DEGREES = ReplySpec("degrees", lambda algorithm, model: algorithm.server_init(model)["degrees"])


@dataclass(frozen=True)
class Learn2pFedNet(Algorithm):
    """Each client learns, on data held out from training, how much of each part of the network is common."""

    scope: Literal["all", "head"] = "all"
    """What is shared: every parameter, or the head over a local body."""
    grain: degrees.Grain = "layer"
    """Granularity of the degrees."""
    consensus: Literal["admm", "primal", "average"] = "admm"
    """How w is found: by ADMM, v going on from where it was; without the dual, v starting at w + z (for clients that
    take part rarely, whose dual is stale); or v starting at w, and w the mean of v."""
    outer: Literal["holdout", "train"] = "holdout"
    """What degrees are learned by: validation loss, or training loss."""
    epochs: int = 2
    """Local epochs of the v-step per round."""
    rho: float = 0.1
    """ADMM penalty of the v-step; eta of the z-step is the same."""
    share: float = 0.9
    """Initial share of the common model, between 0 and 1."""
    outer_lr: float = 0.3
    """Learning rate of log lam (Adam)."""
    pull: float = 0.5
    """Pull of log lam to the common one, which is learned by the clients' summed gradient: 0 keeps degrees own."""
    serve: Literal["shrunk", "own"] = "shrunk"
    """Predict with the shrunk model w + z, or with v."""

    title: ClassVar[str] = "Learn2pFed-Net"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "own model, dual, degrees"
    onboards_fitted: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "head": {"scope": "head", "grain": "parameter", "outer": "train", "pull": 0.0}
        | {"outer_lr": 0.01, "serve": "own"},
        "primal": {"consensus": "primal"},
        "average": {"consensus": "average"},
    }
    citation: ClassVar[str] = Learn2pFed.citation

    def part_sent(self, model: Model) -> Params:
        part = model.params if self.scope == "all" else model.head
        return {k: v for k, v in part.items() if k in model.trainable}

    def server_init(self, model: Model) -> Tree:
        w = self.part_sent(model)
        common = degrees.first(w, self.grain, self.share, self.rho) if self.pull else {}
        moments = tree_map(torch.zeros_like, common)
        return {"w": w, "degrees": common, "first": moments, "second": moments}

    def client_init(self, me: ClientContext) -> Tree:
        zero = tree_map(torch.zeros_like, self.part_sent(me.model))
        moments = tree_map(torch.zeros_like, first := degrees.first(zero, self.grain, self.share, self.rho))
        return {"v": me.model.params, "z": zero, "a": zero, "degrees": first, "first": moments, "second": moments}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        s = self.client_init(me)
        s |= {"v": s["v"] | server["w"], "degrees": s["degrees"] | server["degrees"]}  # a prior: the common ones
        return self.admm_steps(me, s, server["w"], {})[0]

    @on_client(sends=(SHARED.weighted_by(COUNT), DEGREES.summed(), COUNT))
    def local(self, me: ClientContext, w: Params, common: Params) -> tuple[Tree, Tree]:
        s, slope = self.admm_steps(me, me.state, w, common)
        part = {k: s["v"][k] - (0 if self.consensus == "average" else s["z"][k] + s["a"][k]) for k in w}
        return s, (part, slope if self.pull else {}, me.n)

    def admm_steps(self, me: ClientContext, s: Tree, w: Params, common: Params) -> tuple[Tree, Params]:
        """The state after the three steps at a client, with a step of the degrees before the last; and its gradient."""
        logs = s["degrees"] | {k: torch.lerp(s["degrees"][k], x, self.pull) for k, x in common.items()}
        v, z, a, moments = s["v"], s["z"], s["a"], (s["first"], s["second"])
        if self.consensus == "admm":
            a = {k: a[k] + z[k] - v[k] + w[k] for k in w}  # (9), the dual is scaled: its step is 1
        center = {k: w[k] + z[k] + a[k] for k in w}
        start = {"admm": v, "primal": v | center, "average": v | w}[self.consensus]
        v = me.sgd(start, epochs=self.epochs, prox=None if self.consensus == "average" else (center, self.rho))  # (14)
        deviation = {k: v[k] - w[k] - a[k] for k in w}

        def outer(logs: Params) -> torch.Tensor:
            z = degrees.shrunk(deviation, logs, self.grain, self.rho)
            return me.loss(v | {k: w[k] + z[k] for k in w}, "val" if self.outer == "holdout" else "train")

        slope = torch.func.grad(outer)(logs)
        logs, first, second = degrees.adam(logs, slope, moments, self.outer_lr)
        z = degrees.shrunk(deviation, logs, self.grain, self.rho)  # (11)
        return {"v": v, "z": z, "a": a, "degrees": logs, "first": first, "second": second}, slope

    def round(self, fed: Federation, server: Tree) -> Tree:
        parts, slopes, n = fed.map(self.local, server["w"], server["degrees"])
        w, moments = fed.mean(parts, n), (server["first"], server["second"])  # (12)
        # one step on the summed gradient: a mean of the clients' own steps of Adam is no step of Adam
        common, first, second = degrees.adam(server["degrees"], fed.sum(slopes), moments, self.outer_lr)
        return {"w": w, "degrees": common, "first": first, "second": second}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        shrunk = {k: w + me.state["z"][k] for k, w in server["w"].items()}
        return me.state["v"] | (shrunk if self.serve == "shrunk" else {})

    def shares(self, me: ClientContext, server: Tree) -> Params:
        return degrees.shares(me.state["degrees"], server["w"], self.grain, self.rho)

    def effective_degrees(self, me: ClientContext, server: Tree) -> Params:
        return tree_map(torch.exp, degrees.each(me.state["degrees"], server["w"], self.grain))
