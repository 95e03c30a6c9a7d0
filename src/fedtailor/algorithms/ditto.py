"""Ditto: a personal model regularized towards the common one. Li et al., ICML 2021, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class Ditto(Algorithm):
    """The common model is trained as in FedAvg; beside it each client keeps v on F(v) + lam/2 |v - w|^2."""

    epochs: int = 1
    """Local epochs of the common model per round."""
    personal_epochs: int = 1
    """Local epochs of the personal model per round."""
    lam: float = 1.0
    """Weight of the penalty on the distance from the common model; 0 is Local."""

    title: ClassVar[str] = "Ditto"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "a whole personal model"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lam = 0": ({"lam": 0.0, "personal_epochs": 2}, "local", {"epochs": 2}),
    }
    citation: ClassVar[str] = """@inproceedings{li2021ditto,
  title={Ditto: Fair and Robust Federated Learning Through Personalization},
  author={Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle={ICML}, year={2021}
}"""

    def server_init(self, model: Model) -> Params:
        return model.params

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        v = me.sgd(me.state, epochs=self.personal_epochs, prox=(w, self.lam))
        statistics_of_v = me.buffers
        trained = me.sgd(w, epochs=self.epochs)
        me.buffers = statistics_of_v
        return v, (trained, me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(*fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return me.state

    def onboard(self, me: ClientContext, w: Params, epochs: int) -> Params:
        return me.sgd(w, epochs=epochs, prox=(w, self.lam))
