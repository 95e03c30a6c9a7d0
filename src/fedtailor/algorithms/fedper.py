"""FedPer: shared body, private head, trained together. Arivazhagan et al., 2019, Algorithms 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import BODY, COUNT, Algorithm, common, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class FedPer(Algorithm):
    """Body and head take every local step together; only the body is averaged."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "FedPer"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "head"
    private: ClassVar[str] = "head"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no head": ({}, "fedavg", {}, "no-head"),
        "all head": ({}, "local", {}, "all-head"),
    }
    citation: ClassVar[str] = """@article{arivazhagan2019federated,
  title={Federated Learning with Personalization Layers},
  author={Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav},
  journal={arXiv:1912.00818}, year={2019}
}"""

    round = FedRep.round
    personal = FedRep.personal
    shares = FedRep.shares

    def server_init(self, model: Model) -> Params:
        return model.common(model.body)

    def client_init(self, me: ClientContext) -> Params:
        return me.model.without(self.server_init(me.model))

    @on_client(sends=(common(BODY).weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, body: Params) -> tuple[Tree, Tree]:
        w = me.sgd(body | me.state, epochs=self.epochs)
        return {k: w[k] for k in me.state}, ({k: w[k] for k in body}, me.n)
