"""LG-FedAvg: private body, shared head, trained together. Liang et al., 2020, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import COUNT, HEAD, Algorithm, common, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class LGFedAvg(Algorithm):
    """Each client learns how to see its own data; what follows from what is seen is averaged."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "LG-FedAvg"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "body"
    private: ClassVar[str] = "body"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no head": ({}, "local", {}, "no-head"),
        "all head": ({}, "fedavg", {}, "all-head"),
    }
    citation: ClassVar[str] = """@article{liang2020think,
  title={Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author={Liang, Paul Pu and Liu, Terrance and Liu, Ziyin and Allen, Nicholas B. and Auerbach, Randy P. and
    Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe},
  journal={arXiv:2001.01523}, year={2020}
}"""

    round = FedRep.round
    shares = FedRep.shares

    def server_init(self, model: Model) -> Params:
        return model.common(model.head)

    def client_init(self, me: ClientContext) -> Params:
        return me.model.without(self.server_init(me.model))

    @on_client(sends=(common(HEAD).weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, head: Params) -> tuple[Tree, Tree]:
        w = me.sgd(me.state | head, epochs=self.epochs)
        return {k: w[k] for k in me.state}, ({k: w[k] for k in head}, me.n)

    def personal(self, me: ClientContext, head: Params) -> Params:
        return me.state | head
