"""FedTGP: prototypes that the server trains to lie apart. Zhang et al., AAAI 2024, Algorithm 1.

Symbols: P_i(c) the mean feature of class c at client i; F the server's network from a vector of each class to its
prototype P(c); delta the margin, which grows with the distance of the classes up to tau.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedtailor.algorithms._shared import prototypes
from fedtailor.algorithms._shared.heads import weight_of_head
from fedtailor.algorithms._shared.prototypes import COUNTS, IS_KNOWN, PROTOTYPES, class_sums, pulled_losses
from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree

MEANS = ReplySpec("class means", lambda algorithm, model: torch.zeros_like(weight_of_head(model)))


@dataclass(frozen=True)
class FedTGP(Algorithm):
    """As FedProto, with prototypes from a network that the server trains on those of the clients."""

    epochs: int = 1
    """Local epochs per round."""
    lam: float = 10.0
    """Weight of the pull of features towards their class's prototype."""
    server_epochs: int = 100
    """Passes of the server over the clients' class means per round."""
    server_lr: float = 0.01
    """Learning rate of the server."""
    margin: float = 100.0
    """Largest margin between a class mean's own prototype and the others (tau)."""

    title: ClassVar[str] = "FedTGP"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the model"
    citation: ClassVar[str] = """@inproceedings{zhang2024fedtgp,
  title={{FedTGP}: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
    Heterogeneity in Federated Learning},
  author={Zhang, Jianqing and Liu, Yang and Hua, Yang and Cao, Jian},
  booktitle={AAAI}, year={2024}
}"""

    def check(self, model: Model, task: str) -> None:
        prototypes.check_classes(model, task, self.title)

    def server_init(self, model: Model) -> Tree:
        like, (classes, k) = weight_of_head(model), weight_of_head(model).shape
        rng, bound = stream("fedtgp", "network"), k**-0.5
        F = {"vectors": rng.standard_normal((classes, k))}
        F |= {name: rng.uniform(-bound, bound, (k, k)) for name in ("in", "out")}
        F |= {f"{name}_bias": rng.uniform(-bound, bound, k) for name in ("in", "out")}
        return prototypes.no_prototypes(model) | {"F": {name: torch.from_numpy(v).to(like) for name, v in F.items()}}

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    def train(self, me: ClientContext, P: Params, epochs: int) -> Params:
        return me.sgd(me.state, epochs=epochs, frozen=P, loss=pulled_losses(me, self.lam))

    @on_client(sends=(MEANS, COUNTS))
    def local(self, me: ClientContext, P: Params) -> tuple[Tree, Tree]:
        w = self.train(me, P, self.epochs)
        mine = class_sums(me, w)
        return w, (mine.means, mine.counts)

    def round(self, fed: Federation, server: Tree) -> Tree:
        means, counts = fed.map(self.local, known(server))
        names = [fed.names[c] for c in fed.cohort]
        order = sorted(range(len(names)), key=names.__getitem__)
        each = fed.gather(means, "class means of each client")[order]
        has = fed.gather(counts, "class counts of each client")[order] > 0
        F = self.trained(server["F"], each, has, ("fedtgp", fed.seed, fed.round), fed.solver.batch_size)
        return {PROTOTYPES: outputs(F), IS_KNOWN: torch.ones_like(server[IS_KNOWN]), "F": F}

    def trained(self, F: Params, means: Tensor, has: Tensor, key: Sequence[str | int], batch: int) -> Params:
        """The network after the server's passes over the means [clients, classes, features] that there are."""
        points, labels = means[has], has.nonzero()[:, 1]
        delta = min(spread(means, has), self.margin)
        for epoch in range(self.server_epochs):
            order = torch.from_numpy(stream(*key, epoch).permutation(len(points))).to(labels.device)
            for rows in order.split(batch or max(1, len(points))):
                leaf = {k: v.detach().requires_grad_() for k, v in F.items()}
                away = torch.cdist(points[rows], outputs(leaf))
                away = away + delta * one_hot(labels[rows], away.shape[1])
                slopes = torch.autograd.grad(cross_entropy(-away, labels[rows]), list(leaf.values()))  # (8)
                F = {k: v - self.server_lr * g for (k, v), g in zip(F.items(), slopes, strict=True)}
        return F

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state | known(server)

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        return prototypes.by_distance(model, personal, x)

    def onboard(self, me: ClientContext, server: Tree, epochs: int) -> Params:
        return self.train(me, known(server), epochs) | known(server)


def known(server: Tree) -> Params:
    """What clients are sent."""
    return {k: server[k] for k in (PROTOTYPES, IS_KNOWN)}


def outputs(F: Params) -> Tensor:
    """The prototypes [classes, features]."""
    hidden = (F["vectors"] @ F["in"].T + F["in_bias"]).relu()
    return hidden @ F["out"].T + F["out_bias"]


def spread(means: Tensor, has: Tensor) -> float:
    """Of the classes' mean prototypes, the largest distance of one to its nearest."""
    there = has.any(0)
    centers = ((means * has[..., None]).sum(0) / has.sum(0).clamp(min=1)[:, None])[there]
    if len(centers) < 2:
        return 0.0
    apart = torch.cdist(centers, centers).fill_diagonal_(torch.inf)
    return float(apart.min(1).values.max())
