"""FedFomo: each client mixes models that do well on its validation data. Zhang et al., ICLR 2021, equations (4), (5).

Symbols: theta model of a client at the start of a round; theta_n the models that it may mix, its own trained one among
them; w_n weight of theta_n; L loss on validation data; M models to download, p affinity of a client to the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.model_table import gather_models, mean_or, stack_models
from fedtailor.core.algorithm import MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map


@dataclass(frozen=True)
class FedFomo(Algorithm):
    """theta moves towards models with a lower validation loss, the more the lower it is and the nearer they are."""

    epochs: int = 1
    """Local epochs per round."""
    models: int = 5
    """Models of other clients that a client downloads per round (M)."""
    epsilon: float = 0.3
    """Probability of a random download instead of the next by affinity, in the first round."""
    epsilon_decay: float = 0.05
    """Decrease of epsilon per round."""

    title: ClassVar[str] = "FedFomo"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "model"
    by_client: ClassVar[tuple[str, ...]] = ("p",)
    citation: ClassVar[str] = """@inproceedings{zhang2021personalized,
  title={Personalized Federated Learning with First Order Model Optimization},
  author={Zhang, Michael and Sapra, Karan and Fidler, Sanja and Yeung, Serena and Alvarez, Jose M.},
  booktitle={ICLR}, year={2021}
}"""

    def server_init(self, model: Model) -> Tree:
        return {"p": {}, "models": {}}  # by name: affinity to each of all clients; what was sent in the last round

    def client_init(self, me: ClientContext) -> Tree:
        nothing = tree_map(torch.zeros_like, me.model.params)
        theta = me.model.params
        return {"theta": theta, "trained": theta, "move": nothing, "total": torch.zeros_like(me.n)}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        mean = mean_or(me.model.params, server["models"])
        return self.client_init(me) | {"theta": mean, "trained": mean}

    @on_client(sends=NUMBER)
    def weigh(self, me: ClientContext, theta_n: Params) -> tuple[Tree, Tree]:
        return self.weigh_model(me, me.state, theta_n)

    def weigh_model(self, me: ClientContext, s: Tree, theta_n: Params) -> tuple[Tree, Tensor]:
        theta, trained = s["theta"], me.model.trainable
        distance = torch.stack([(theta_n[k] - theta[k]).square().sum() for k in trained]).sum().sqrt()
        w = (loss(me, theta) - loss(me, theta_n)) / distance.clamp(min=1e-12)  # (5)
        counts = w.clamp(min=0)
        move = {k: v + counts * (theta_n[k] - theta[k]) for k, v in s["move"].items()}
        return s | {"move": move, "total": s["total"] + counts}, w

    @on_client(sends=MODEL)
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        s, total = me.state, me.state["total"]
        share = torch.where(total > 0, 1 / total.clamp(min=1e-30), 0)
        theta = {k: v + share * s["move"][k] for k, v in s["theta"].items()}  # (4)
        trained = me.sgd(theta, epochs=self.epochs)
        return self.weigh_model(me, self.client_init(me) | {"theta": theta, "trained": trained}, trained)[0], trained

    def round(self, fed: Federation, server: Tree) -> Tree:
        models, names = server["models"], fed.names
        p = {names[c]: server["p"].get(names[c], fed.model.like.new_zeros(fed.clients)) for c in fed.cohort}
        chosen = {c: self.choose(fed, names[c], sorted(models), p[names[c]]) for c in fed.cohort}
        for m in range(min(map(len, chosen.values()))):
            w = fed.map(self.weigh, fed.scatter(stack_models(models[chosen[c][m]] for c in fed.cohort)))
            for c, value in zip(w.clients, fed.gather(w, "weights of models"), strict=True):
                at = fed.places([names.index(chosen[c][m])])
                p[names[c]] = p[names[c]].index_add(0, at, value[None])
        return {"p": server["p"] | p, "models": gather_models(fed, fed.map(self.local))}

    def choose(self, fed: Federation, name: str, known: list[str], p: Tensor) -> list[str]:
        """Whose models a client gets: one after the other the next by affinity, or anyone."""
        draw = stream(fed.seed, fed.round, name, "FedFomo")
        anyone = [str(n) for n in draw.permutation([n for n in known if n != name])]
        nearest = sorted(anyone, key=lambda n: -float(p[fed.names.index(n)]))
        epsilon, chosen = self.epsilon - self.epsilon_decay * (fed.round - 1), []
        for _ in range(min(self.models, len(anyone))):
            chosen.append((anyone if draw.random() < epsilon else nearest)[0])
            anyone.remove(chosen[-1])
            nearest.remove(chosen[-1])
        return chosen

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state["trained"]


def loss(me: ClientContext, params: Params) -> Tensor:
    """On validation data; a client without any takes its training data."""
    return torch.where(me.val.mask.sum() > 0, me.loss(params, "val"), me.loss(params))
