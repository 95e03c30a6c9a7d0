"""FedAvg+FT: the common model of FedAvg, fine-tuned by each client. Yu et al., 2020, section 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.context import ClientContext
from fedtailor.core.trees import Params


@dataclass(frozen=True)
class FedAvgFT(Algorithm):
    """Rounds of FedAvg; a client predicts with the common model after `tune_epochs` on its own data."""

    epochs: int = 1
    """Local epochs per round."""
    tune_epochs: int = 5
    """Epochs of fine-tuning before a client predicts."""

    title: ClassVar[str] = "FedAvg+FT"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the fine-tuned model"
    onboards_fitted: ClassVar[bool] = True
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no fine-tuning": ({"tune_epochs": 0}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@article{yu2020salvaging,
  title={Salvaging Federated Learning by Local Adaptation},
  author={Yu, Tao and Bagdasaryan, Eugene and Shmatikov, Vitaly},
  journal={arXiv:2002.04758}, year={2020}
}"""

    server_init = FedAvg.server_init
    local = FedAvg.local
    round = FedAvg.round

    def personal(self, me: ClientContext, w: Params) -> Params:
        return me.sgd(w, epochs=self.tune_epochs)
