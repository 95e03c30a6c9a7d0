"""DR-FedAvg: FedAvg that gives more weight to clients with a larger loss. Zhao, Joshi, ICASSP 2022."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class DRFedAvg(Algorithm):
    """Weights n F^(q + 1), with F the client's loss of the common model; q = -1 is FedAvg."""

    epochs: int = 1
    """Local epochs per round."""
    q: float = 1.0
    """Exponent of the loss in the weights."""
    summed: bool = False
    """Multiply the loss by the client's number of steps, as in the code released with the DUW paper."""

    title: ClassVar[str] = "DR-FedAvg"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "q = -1": ({"q": -1.0}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@inproceedings{zhao2022dynamic,
  title={A Dynamic Reweighting Strategy for Fair Federated Learning},
  author={Zhao, Z. and Joshi, G.},
  booktitle={ICASSP}, year={2022}
}"""

    server_init = FedAvg.server_init

    @on_client(sends=(MODEL.weighted_by(COUNT), replace(COUNT, is_free=True)))  # by the loss, which has no bound
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        loss = me.loss(w) * (me.steps(self.epochs) if self.summed else 1)
        return {}, (me.sgd(w, epochs=self.epochs), me.n * loss.clamp(min=1e-6) ** (self.q + 1))

    def round(self, fed: Federation, w: Params) -> Params:
        models, weight = fed.map(self.local, w)
        return fed.mean(models, weight, stale=w)

    personal = FedAvg.personal
