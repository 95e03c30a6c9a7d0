"""PeFLL: one network encodes a client's data, another generates its model. Scott et al., ICLR 2024, Algorithm 1.

Symbols: v_i descriptor of client i, the mean over its samples of the embedding network with weights psi; phi weights of
the hypernetwork h; theta_i = h(v_i; phi) model of client i, and theta~_i what it is after local training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared import hypernetwork
from fedtailor.algorithms._shared.model_table import gather_models, less
from fedtailor.algorithms.fedpac import weight_of_head
from fedtailor.algorithms.pfedhn import EMBEDDING, models
from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, detach, tree_map
from fedtailor.errors import ConfigError, RoundAbandoned

SPREAD = 3.0  # so that the descriptors of clients with other labels lie some units apart


@dataclass(frozen=True)
class PeFLL(Algorithm):
    """pFedHN whose embeddings follow from a client's data: a newcomer has its model without any training."""

    epochs: int = 1
    """Local epochs per round."""
    embedding: int = 8
    """Length of a client's descriptor v."""
    hidden: int = 64
    """Units per hidden layer of the hypernetwork; 0 is FedAvg with equal weights."""
    hn_lr: float = 1.0
    """Learning rate of phi."""
    embedding_lr: float = 0.01
    """Learning rate of psi."""

    title: ClassVar[str] = "PeFLL"
    learns: ClassVar[str] = "generators"
    keeps: ClassVar[str] = "model"
    onboards_fitted: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no hidden units": ({"hidden": 0}, "fedavg", {}, "equal-sizes full-batch"),
    }
    citation: ClassVar[str] = """@inproceedings{scott2024pefll,
  title={{PeFLL}: Personalized Federated Learning by Learning to Learn},
  author={Scott, Jonathan and Zakerinia, Hossein and Lampert, Christoph H.},
  booktitle={ICLR}, year={2024}
}"""

    def check(self, model: Model, task: str) -> None:
        if [v.dim() for v in model.head.values() if v.dim() > 1] != [2]:
            raise ConfigError("model.head: PeFLL reads the number of outputs off a head of one dense layer")

    def server_init(self, model: Model) -> Tree:
        draw = stream("PeFLL", "mix").normal(size=(self.embedding, 2 * len(weight_of_head(model))))
        mix = SPREAD * torch.from_numpy(draw).to(model.like)
        psi = {"net": model.trainable, "mix": mix}
        phi = hypernetwork.start(model, self.embedding, self.hidden, "PeFLL")
        return {"phi": phi, "psi": psi, "statistics": averaged_statistics(model)}

    @on_client(sends=EMBEDDING)
    def describe(self, me: ClientContext, psi: Tree) -> tuple[Tree, Tree]:
        return me.state, descriptor(me, psi)

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, theta: Params, statistics: Params) -> tuple[Tree, Tree]:
        return me.state, me.sgd(theta | statistics, epochs=self.epochs)

    def round(self, fed: Federation, server: Tree) -> Tree:
        now = {"phi": server["phi"], "psi": server["psi"]}
        learned = fed.tape(now)
        descriptors = fed.map(self.describe, learned["psi"])
        v, names = fed.gather(descriptors, "descriptor of each client"), [fed.names[c] for c in descriptors.clients]
        theta = models(fed.model, learned["phi"], v)
        replies = fed.map_untaped(self.local, fed.scatter(detach(theta)), server["statistics"])
        trained = gather_models(fed, replies)
        if len(trained) < len(names):
            raise RoundAbandoned(f"round {fed.round}: a client was lost in training; a taped round needs all")
        change = less(detach(theta), names, trained, fed.model)  # theta_i - theta~_i stands for the gradient by theta_i
        slope = fed.backward(torch.stack([(change[k] * x).sum() for k, x in theta.items()]).sum() / len(names))
        lr = {"phi": self.hn_lr, "psi": self.embedding_lr}
        stepped = {part: tree_map(lambda x, s, a=lr[part]: x - a * s, now[part], slope[part]) for part in now}
        return stepped | {"statistics": {k: fed.mean(replies[k]) for k in server["statistics"]}}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        v = descriptor(me, server["psi"])
        return hypernetwork.generate(server["phi"], v, me.model) | server["statistics"]


def averaged_statistics(model: Model) -> Params:
    return {k: v for k, v in model.params.items() if k not in model.trainable}


def descriptor(me: ClientContext, psi: Tree) -> Tensor:
    """The mean over a client's training samples of what the embedding network makes of x and y."""
    tensors = psi["net"] | me.model.private_buffers | averaged_statistics(me.model)
    total = me.n.new_zeros(psi["mix"].shape[1])
    for x, y, mask in me.train.parts():
        output = me.model(tensors, x)
        is_label = (y[:, None] == torch.arange(output.shape[1], device=y.device)) if y.dim() == 1 else y
        each = torch.cat([output, is_label.to(output.dtype)], 1)
        total = total + torch.where(mask[:, None] > 0, each, 0).sum(0)
    return psi["mix"] @ (total / me.n)
