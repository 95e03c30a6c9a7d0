"""FedProto: clients share the means of their classes' features, no weights. Tan et al., AAAI 2022, Algorithm 1.

Symbols: omega_i the model of client i; C_i(j) the mean feature of its samples of class j, C(j) that of all clients'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedtailor.algorithms._shared import prototypes
from fedtailor.algorithms._shared.prototypes import COUNTS, SUMS, class_sums, pulled_losses
from fedtailor.core.algorithm import Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Each client trains a model of its own, with features pulled towards the common prototypes of the classes."""

    epochs: int = 1
    """Local epochs per round."""
    lam: float = 1.0
    """Weight of the pull of features towards their class's prototype."""
    predict_by: Literal["prototypes", "head"] = "prototypes"
    """A class by its nearest prototype, or by the client's own head."""

    title: ClassVar[str] = "FedProto"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the model"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lam = 0, by the head": ({"lam": 0.0, "predict_by": "head"}, "local", {}),
    }
    citation: ClassVar[str] = """@inproceedings{tan2022fedproto,
  title={{FedProto}: Federated Prototype Learning across Heterogeneous Clients},
  author={Tan, Yue and Long, Guodong and Liu, Lu and Zhou, Tianyi and Lu, Qinghua and Jiang, Jing and Zhang, Chengqi},
  booktitle={AAAI}, year={2022}
}"""

    def check(self, model: Model, task: str) -> None:
        prototypes.check_classes(model, task, self.title)

    def server_init(self, model: Model) -> Params:
        return prototypes.no_prototypes(model)

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    def train(self, me: ClientContext, C: Params, epochs: int) -> Params:
        return me.sgd(me.state, epochs=epochs, frozen=C, loss=pulled_losses(me, self.lam))  # (7)

    @on_client(sends=(SUMS.summed(), COUNTS.summed()))
    def local(self, me: ClientContext, C: Params) -> tuple[Tree, Tree]:
        omega = self.train(me, C, self.epochs)
        mine = class_sums(me, omega)  # C_i times the number of samples, (3)
        return omega, (mine.sums, mine.counts)

    def round(self, fed: Federation, C: Params) -> Params:
        sums, counts = fed.map(self.local, C)
        return prototypes.renew(C, fed.sum(sums), fed.sum(counts))  # (6)

    def personal(self, me: ClientContext, C: Params) -> Params:
        return me.state | C

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        if self.predict_by == "head":
            return model(prototypes.of_model(model, personal), x)
        return prototypes.by_distance(model, personal, x)

    def onboard(self, me: ClientContext, C: Params, epochs: int) -> Params:
        return self.train(me, C, epochs) | C
