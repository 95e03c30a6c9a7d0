"""FedRoD: a common head trained for balanced classes, a personal one on top. Chen, Chao, ICLR 2022, section 4.

Symbols: f features; G generic head, averaged with the body; P personal head, linear; gamma exponent of a client's class
counts in the balanced softmax loss. The outputs are G(f) for anybody, and G(f) + P(f) for the client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedtailor.algorithms._shared.heads import check_dense_head, weight_of_head
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

WEIGHT, BIAS, PRIOR = "fedrod.weight", "fedrod.bias", "fedrod.prior"


@dataclass(frozen=True)
class FedRoD(Algorithm):
    """Body and G learn the balanced loss and are averaged; P learns, on their outputs, the client's own loss."""

    epochs: int = 1
    """Local epochs per round."""
    gamma: float = 1.0
    """Exponent of the class counts in the balanced loss; with 0 the common model is FedAvg's."""

    title: ClassVar[str] = "FedRoD"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "head"
    private: ClassVar[str] = "a second head"
    stale: ClassVar[bool] = True
    citation: ClassVar[str] = """@inproceedings{chen2022bridging,
  title={On Bridging Generic and Personalized Federated Learning for Image Classification},
  author={Chen, Hong-You and Chao, Wei-Lun},
  booktitle={ICLR}, year={2022}
}"""

    server_init, round = FedAvg.server_init, FedAvg.round

    def check(self, model: Model, task: str) -> None:
        if task != "classification":
            raise ConfigError(f"algorithm.name: FedRoD balances classes; it does not serve {task}")
        check_dense_head(model, self.title)

    def client_init(self, me: ClientContext) -> Params:
        weight = torch.zeros_like(weight_of_head(me.model))
        return {WEIGHT: weight, BIAS: weight[:, 0]}

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        _, y, mask = me.train
        counts = ((y[:, None] == torch.arange(len(me.state[BIAS]), device=y.device)) * mask[:, None]).sum(0)

        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            f, g = me.model.features_and_outputs(t, x, training=True)
            balanced = cross_entropy(g + t[PRIOR], y, reduction="none")
            return balanced + cross_entropy(both(t, f.detach(), g.detach()), y, reduction="none")

        prior = {PRIOR: (counts**self.gamma).log()}  # -inf for a class that the client does not have
        trained = me.sgd(w | me.state, epochs=self.epochs, frozen=prior, loss=loss)
        return {k: trained[k] for k in me.state}, ({k: trained[k] for k in w}, me.n)

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w | me.state

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        return both(personal, *model.features_and_outputs(personal, x))

    def onboard(self, me: ClientContext, w: Params, epochs: int) -> Params:
        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(both(t, *me.model.features_and_outputs(t, x, training=True)), y, reduction="none")

        return w | me.sgd(me.state, epochs=epochs, frozen=w, loss=loss)


def both(t: Params, f: Tensor, g: Tensor) -> Tensor:
    """G(f) + P(f)."""
    return g + f @ t[WEIGHT].T + t[BIAS]
