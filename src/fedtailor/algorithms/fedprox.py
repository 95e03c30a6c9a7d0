"""FedProx: FedAvg with a proximal term towards the common model. Li et al., MLSys 2020, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class FedProx(Algorithm):
    """The local loss gains mu/2 |w - w^t|^2; mu = 0 is FedAvg."""

    epochs: int = 1
    """Local epochs per round."""
    mu: float = 0.01
    """Weight of the proximal term."""

    title: ClassVar[str] = "FedProx"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "nothing"
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mu = 0": ({"mu": 0.0}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@inproceedings{li2020federated,
  title={Federated Optimization in Heterogeneous Networks},
  author={Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and
    Talwalkar, Ameet and Smith, Virginia},
  booktitle={MLSys}, year={2020}
}"""

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, (me.sgd(w, epochs=self.epochs, prox=(w, self.mu)), me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        models, n = fed.map(self.local, w)
        return fed.mean(models, n, stale=w)

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w
