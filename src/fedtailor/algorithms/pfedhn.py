"""pFedHN: a hypernetwork generates each client's model from its embedding. Shamsian et al., ICML 2021, Algorithm 1.

Symbols: v_i embedding of client i; phi weights of the hypernetwork h; theta_i = h(v_i; phi) model of client i, and
theta~_i what it is after local training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared import hypernetwork
from fedtailor.algorithms._shared.model_table import gather_models, less
from fedtailor.core.algorithm import MODEL, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map

EMBEDDING = ReplySpec("embedding", lambda algorithm, model: model.like.new_zeros(algorithm.embedding))


@dataclass(frozen=True)
class PFedHN(Algorithm):
    """What is common is not a model, but how a model follows from who a client is."""

    epochs: int = 1
    """Local epochs per round."""
    embedding: int = 8
    """Length of a client's embedding v."""
    hidden: int = 64
    """Units per hidden layer of the hypernetwork; 0 is FedAvg with equal weights."""
    hn_lr: float = 1.0
    """Learning rate of phi."""
    embedding_lr: float = 0.1
    """Learning rate of an embedding."""

    title: ClassVar[str] = "pFedHN"
    learns: ClassVar[str] = "generators"
    keeps: ClassVar[str] = "model"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no hidden units": ({"hidden": 0}, "fedavg", {}, "equal-sizes full-batch"),
    }
    citation: ClassVar[str] = """@inproceedings{shamsian2021personalized,
  title={Personalized Federated Learning using Hypernetworks},
  author={Shamsian, Aviv and Navon, Aviv and Fetaya, Ethan and Chechik, Gal},
  booktitle={ICML}, year={2021}
}"""

    def server_init(self, model: Model) -> Tree:
        statistics = {k: v for k, v in model.params.items() if k not in model.trainable}
        return {"phi": hypernetwork.start(model, self.embedding, self.hidden, "pFedHN"), "statistics": statistics}

    def client_init(self, me: ClientContext) -> Tree:
        return {"v": 2 * me.uniform(self.embedding) - 1}

    @on_client(sends=EMBEDDING)
    def tell(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.state["v"]

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, theta: Params, statistics: Params) -> tuple[Tree, Tree]:
        return me.state, me.sgd(theta | statistics, epochs=self.epochs)

    @on_client()
    def keep(self, me: ClientContext, v: Tensor) -> tuple[Tree, Tree]:
        return {"v": v}, None

    def round(self, fed: Federation, server: Tree) -> Tree:
        phi, embeddings = server["phi"], fed.map(self.tell)
        v, names = fed.gather(embeddings, "embedding of each client"), [fed.names[c] for c in embeddings.clients]
        theta, pull_back = torch.func.vjp(lambda phi, v: models(fed.model, phi, v), phi, v)  # type: ignore[misc]
        replies = fed.map(self.local, fed.scatter(theta), server["statistics"])
        trained = gather_models(fed, replies)
        by_phi, by_v = pull_back(less(theta, names, trained, fed.model))  # line 6: J^T (theta_i - theta~_i)
        v = v - self.embedding_lr * by_v
        fed.map(self.keep, fed.scatter(v[[embeddings.clients.index(c) for c in fed.cohort]]))
        phi = tree_map(lambda x, slope: (x - self.hn_lr * slope / len(trained)).contiguous(), phi, by_phi)
        return {"phi": phi, "statistics": {k: fed.mean(replies[k]) for k in server["statistics"]}}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return hypernetwork.generate(server["phi"], me.state["v"], me.model) | server["statistics"]

    def onboard(self, me: ClientContext, server: Tree, epochs: int) -> Params:
        """Only the embedding is learned, on all samples at a time."""

        def model(v: Tensor) -> Params:
            return hypernetwork.generate(server["phi"], v, me.model) | server["statistics"]

        v = me.state["v"]
        for _ in range(epochs):
            v = v - self.embedding_lr * torch.func.grad(lambda v: me.loss(model(v)))(v)
        return model(v)


def models(model: Model, phi: Tree, v: Tensor) -> Params:
    """Row i: what the hypernetwork makes of the i-th embedding."""
    return torch.func.vmap(lambda one: hypernetwork.generate(phi, one, model))(v)
