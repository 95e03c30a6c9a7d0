"""FedFa: weights by training accuracy and by how often a client took part. Huang et al., 2022.

Symbols: A = -log2(share of accuracies), B = -log2(1 - share of participations), each divided by its sum; weight
(1 - gamma) A + gamma B. A gives more weight to a *lower* accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.core.algorithm import MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, wide, widest
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class FedFa(Algorithm):
    """FedAvg with weights that help the inaccurate and the frequent; without the momentum of the original."""

    epochs: int = 1
    """Local epochs per round."""
    gamma: float = 0.5
    """Weight of participation relative to accuracy."""

    title: ClassVar[str] = "FedFa"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    stale: ClassVar[bool] = True
    by_client: ClassVar[tuple[str, ...]] = ("took_part",)
    citation: ClassVar[str] = """@article{huang2022fairness,
  title={Fairness and Accuracy in Horizontal Federated Learning},
  author={Huang, Wei and Li, Tianrui and Wang, Dexian and Du, Shengdong and Zhang, Junbo and Huang, Tianqiang},
  journal={Information Sciences}, volume={589}, year={2022}
}"""

    def check(self, model: Model, task: str) -> None:
        if task != "classification":
            raise ConfigError(f"algorithm.name: FedFa weighs by accuracy; it is for classification, not {task}")

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params}

    @on_client(sends=(MODEL, NUMBER))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        trained = me.sgd(w, epochs=self.epochs)
        right = me.n.new_zeros(())
        for x, y, mask in me.train.parts():
            right = right + ((me.model(me.buffers | trained, x).argmax(-1) == y) * mask).sum()
        return {}, (trained, right / me.n.clamp(min=1))

    def round(self, fed: Federation, server: Tree) -> Tree:
        models, accuracy = fed.map(self.local, server["w"])
        at = fed.places(models.clients)
        took_part = server.get("took_part", at.new_zeros(fed.clients, dtype=widest(at.device)))
        took_part = took_part.index_add(0, at, torch.ones_like(at, dtype=took_part.dtype))
        by_accuracy = rarity(wide(fed.gather(accuracy, "training accuracies")))
        often = took_part[at] / took_part[at].sum()
        by_part = _shares(-(1 - often).clamp(min=1e-6).log2())
        weight = (1 - self.gamma) * by_accuracy + self.gamma * by_part
        mean = fed.mean(models, fed.scatter(weight), stale=server["w"])
        return {"w": mean, "took_part": took_part}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["w"]


def rarity(accuracy: Tensor) -> Tensor:
    """Shares of the information -log2(share of the accuracy)."""
    return _shares(-_shares(accuracy.clamp(min=1e-6)).log2())


def _shares(x: Tensor) -> Tensor:
    return (x + 1e-12) / (x + 1e-12).sum()
