"""pFedLA: each layer of a client's model is a mixture of all clients' layers. Ma et al., CVPR 2022, Algorithm 1.

Symbols: theta_i model of client i; theta_bar_i what it is sent: layer l is sum over j of alpha_ij^l theta_j^l; alpha_i
the output of a small network of the server for client i, with an embedding v_i and weights phi_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared.layers import layers_of
from fedtailor.algorithms._shared.model_table import gather_models, less, mean_or, stack_models
from fedtailor.core.algorithm import MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map


@dataclass(frozen=True)
class PFedLA(Algorithm):
    """A hypernetwork for each client learns, layer by layer, whose models to begin its training with."""

    epochs: int = 1
    """Local epochs per round."""
    hn_lr: float = 10.0
    """Learning rate of the hypernetworks; 0 starts from the unweighted mean of all models."""
    gradient: Literal["change", "exact"] = "change"
    """Their gradient: minus the change made by training (paper), or exact, of the validation loss afterwards."""
    embedding: int = 16
    """Length of v."""
    hidden: int = 32
    """Units of the hypernetwork's hidden layer."""

    title: ClassVar[str] = "pFedLA"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "model"
    by_client: ClassVar[tuple[str, ...]] = ("alpha",)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"exact": {"gradient": "exact"}}
    citation: ClassVar[str] = """@inproceedings{ma2022layer,
  title={Layer-wised Model Aggregation for Personalized Federated Learning},
  author={Ma, Xiaosong and Zhang, Jie and Guo, Song and Xu, Wenchao},
  booktitle={CVPR}, year={2022}
}"""

    def server_init(self, model: Model) -> Tree:
        return {"w": {}, "hidden": {}, "alpha": {}}  # by name: its last model, its hypernetwork's two layers

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    def onboard_init(self, me: ClientContext, server: Tree) -> Params:
        return mean_or(me.model.params, server["w"])

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, theta_bar: Params) -> tuple[Tree, Tree]:
        theta = me.sgd(theta_bar, epochs=self.epochs)
        return theta, theta

    @on_client(sends=NUMBER.summed())
    def judge(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.loss(me.state, "val")

    def round(self, fed: Federation, server: Tree) -> Tree:
        here = [fed.names[c] for c in fed.cohort]
        known = dict.fromkeys(here, fed.model.params) | server["w"]
        first = {n: self.hypernetwork(fed, n) for n in here}
        hn = {part: {n: server[part].get(n, first[n][part]) for n in here} for part in ("hidden", "alpha")}
        if self.gradient == "exact":
            theta_bar = mix_models(fed, fed.tape(hn), known)
            replies = fed.map(self.local, fed.scatter(theta_bar))
            gradient = fed.backward(fed.sum(fed.map(self.judge)))
            new = gather_models(fed, replies)
        else:
            theta_bar, pull_back = torch.func.vjp(lambda hn: mix_models(fed, hn, known), hn)  # type: ignore[misc]
            new = gather_models(fed, fed.map(self.local, fed.scatter(theta_bar)))
            (gradient,) = pull_back(less(theta_bar, here, new, fed.model))  # (6) and (7)
        hn = tree_map(lambda v, slope: v - self.hn_lr * slope, hn, gradient)
        return {"w": server["w"] | new} | {part: server[part] | hn[part] for part in hn}

    def hypernetwork(self, fed: Federation, name: str) -> Tree:
        """Of a new client: all others weigh the same."""
        draw, like, width = stream(fed.seed, "pFedLA", name), fed.model.like, (self.hidden, self.embedding)
        common = torch.from_numpy(stream(fed.seed, "pFedLA").normal(size=width)).to(like) / self.embedding**0.5
        v = torch.from_numpy(draw.normal(size=self.embedding)).to(like)
        out = like.new_zeros(self.hidden + 1, len(set(layers_of(fed.model).values())), fed.clients)
        return {"hidden": {"v": v, "weight": common, "bias": torch.zeros_like(common[:, 0])}, "alpha": out}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state


def mix_models(fed: Federation, hn: Tree, known: dict[str, Params]) -> Params:
    """Row i: theta_bar of the i-th client, from the models that the server knows."""
    at, layers = [fed.names.index(name) for name in known], layers_of(fed.model)
    alpha = torch.stack([weights(hn["hidden"][n], hn["alpha"][n])[:, at].softmax(1) for n in hn["hidden"]])
    return {k: torch.tensordot(alpha[:, layers[k]], v, dims=1) for k, v in stack_models(known.values()).items()}


def weights(hidden: Params, out: Tensor) -> Tensor:
    """What a hypernetwork says to each layer and client, before it is made to add up to 1."""
    units = (hidden["weight"] @ hidden["v"] + hidden["bias"]).relu()
    return torch.tensordot(units, out[:-1], dims=1) / len(units) ** 0.5 + out[-1]
