"""Learn2pFed-Net: Learn2pFed for networks, with gradient v-steps (14). Lv et al., 2024, section IV-D.

Symbols: w common model; v own model; z = v - w; a scaled dual; lam degree of collaboration; s = lam / (lam + eta) the
share of the common model. Served is the shrunk model w + z.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any, ClassVar, Literal

import torch

from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.core.algorithm import COUNT, Algorithm, Sent, on_client
from fedtailor.core.federation import Federation
from fedtailor.core.me import Me
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map

SHARED = Sent("shared part", lambda algorithm, model: algorithm.shared(model))
DEGREES = Sent("degrees", lambda algorithm, model: algorithm.server_init(model)["degrees"])


@dataclass(frozen=True)
class Learn2pFedNet(Algorithm):
    """Each client learns, on data held out from training, how much of each part of the network is common."""

    scope: Literal["all", "head"] = "all"
    """What collaborates: every parameter, or the head over a body that stays local (paper)."""
    grain: Literal["layer", "tensor", "parameter"] = "layer"
    """What has a degree of its own."""
    consensus: Literal["admm", "primal", "average"] = "admm"
    """How w is found: by ADMM, v going on from where it was; without the dual, v starting at w + z (for clients that
    take part rarely, whose dual is stale); or v starting at w, and w the mean of v."""
    outer: Literal["holdout", "train"] = "holdout"
    """What degrees are learned by: validation loss, or training loss (paper)."""
    epochs: int = 2
    """Local epochs of the v-step per round."""
    rho: float = 0.1
    """Pull of the v-step; eta of the z-step is the same."""
    share: float = 0.9
    """First share of the common model, between 0 and 1."""
    outer_lr: float = 0.3
    """Step size of log lam (Adam)."""
    pull: float = 0.5
    """Pull of log lam to the clients' mean: 0 keeps degrees own, 1 makes them common."""
    serve: Literal["shrunk", "own"] = "shrunk"
    """Predict with the shrunk model w + z, or with v (paper)."""

    title: ClassVar[str] = "Learn2pFed-Net"
    private: ClassVar[str] = "own model, dual, degrees"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"scope": "head", "grain": "parameter", "outer": "train", "pull": 0.0, "outer_lr": 0.01}
        | {"serve": "own"},
        "primal": {"consensus": "primal"},
        "average": {"consensus": "average"},
    }
    citation: ClassVar[str] = Learn2pFed.citation

    def shared(self, model: Model) -> Params:
        """The part that is sent."""
        part = model.params if self.scope == "all" else model.head
        return {k: v for k, v in part.items() if k in model.trainable}

    def group(self, name: str) -> str:
        """What a parameter shares its degree with."""
        return name.rpartition(".")[0] if self.grain == "layer" else name

    def degrees(self, model: Model) -> Params:
        """First log lam of every group, such that lam / (lam + rho) is the first share."""
        first = torch.tensor(log(self.rho * self.share / (1 - self.share)), dtype=model.dtype)
        part = self.shared(model)
        if self.grain == "parameter":
            return {k: first.expand(v.shape).clone() for k, v in part.items()}
        return {self.group(k): first for k in part}

    def server_init(self, model: Model) -> Tree:
        return {"w": self.shared(model), "degrees": self.degrees(model) if self.pull else {}}

    def client_init(self, me: Me) -> Tree:
        zero = tree_map(torch.zeros_like, self.shared(me.model))
        degrees = self.degrees(me.model)
        moments = tree_map(torch.zeros_like, degrees)
        return {"v": me.model.params, "z": zero, "a": zero, "degrees": degrees, "first": moments, "second": moments}

    def join(self, me: Me, server: Tree) -> Tree:
        s = self.client_init(me)
        s |= {"v": s["v"] | server["w"], "degrees": s["degrees"] | server["degrees"]}  # a prior: the others' mean
        return self.fitted(me, s, server["w"], {})

    def shrunk(self, deviation: Params, degrees: Params) -> Params:
        """z = (1 - s) (v - w - a)."""
        return {k: (1 - torch.sigmoid(degrees[self.group(k)] - log(self.rho))) * x for k, x in deviation.items()}

    @on_client(sends=(SHARED, DEGREES, COUNT))
    def local(self, me: Me, w: Params, mean: Params) -> tuple[Tree, Tree]:
        s = self.fitted(me, me.state, w, mean)
        v, z, a = s["v"], s["z"], s["a"]
        part = {k: v[k] if self.consensus == "average" else v[k] - z[k] - a[k] for k in w}
        return s, (part, s["degrees"] if self.pull else {}, me.n)

    def fitted(self, me: Me, s: Tree, w: Params, mean: Params) -> Tree:
        """The state after the three steps at a client, with a step of the degrees before the last."""
        degrees = s["degrees"] | {k: torch.lerp(s["degrees"][k], common, self.pull) for k, common in mean.items()}
        v, z, a = s["v"], s["z"], s["a"]
        if self.consensus == "average":
            v = me.sgd(v | w, epochs=self.epochs)
        else:
            if self.consensus == "admm":
                a = {k: a[k] + z[k] - v[k] + w[k] for k in w}  # (9), the dual is scaled: its step is 1
            center = {k: w[k] + z[k] + a[k] for k in w}
            v = me.sgd(
                v if self.consensus == "admm" else v | center, epochs=self.epochs, prox=(center, self.rho)
            )  # (14)
        deviation = {k: v[k] - w[k] - a[k] for k in w}

        def outer(degrees: Params) -> torch.Tensor:
            z = self.shrunk(deviation, degrees)
            return me.loss(v | {k: w[k] + z[k] for k in w}, "val" if self.outer == "holdout" else "train")

        gradient = torch.func.grad(outer)(degrees)
        first = {k: 0.5 * m + 0.5 * gradient[k] for k, m in s["first"].items()}
        second = {k: 0.9 * u + 0.1 * gradient[k].square() for k, u in s["second"].items()}
        degrees = {k: x - self.outer_lr * first[k] / (second[k].sqrt() + 1e-12) for k, x in degrees.items()}
        z = self.shrunk(deviation, degrees)  # (11)
        return {"v": v, "z": z, "a": a, "degrees": degrees, "first": first, "second": second}

    def round(self, fed: Federation, server: Tree) -> Tree:
        parts, degrees, n = fed.map(self.local, server["w"], server["degrees"])
        return {"w": fed.mean(parts, n), "degrees": fed.mean(degrees)}  # (12)

    def personal(self, me: Me, server: Tree) -> Params:
        if self.serve == "own":
            return me.state["v"]
        return me.state["v"] | {k: w + me.state["z"][k] for k, w in server["w"].items()}

    def shares(self, me: Me, server: Tree) -> Params:
        s = {k: torch.sigmoid(me.state["degrees"][self.group(k)] - log(self.rho)) for k in server["w"]}
        return {k: s[k].expand(w.shape) for k, w in server["w"].items()}

    def effective_degrees(self, me: Me, server: Tree) -> Params:
        return {k: me.state["degrees"][self.group(k)].exp().expand(w.shape) for k, w in server["w"].items()}
