"""FedProx+FT: the common model of FedProx, fine-tuned by each client without the proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms.fedprox import FedProx
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.context import ClientContext
from fedtailor.core.trees import Params


@dataclass(frozen=True)
class FedProxFT(Algorithm):
    """Rounds of FedProx; a client predicts with the common model after `tune_epochs` on its own data."""

    epochs: int = 1
    """Local epochs per round."""
    mu: float = 0.01
    """Weight of the proximal term in the rounds; fine-tuning has none."""
    tune_epochs: int = 5
    """Epochs of fine-tuning before a client predicts."""

    title: ClassVar[str] = "FedProx+FT"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the fine-tuned model"
    onboards_fitted: ClassVar[bool] = True
    stale: ClassVar[bool] = True
    citation: ClassVar[str] = FedProx.citation
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no fine-tuning": ({"tune_epochs": 0, "mu": 0.8}, "fedprox", {"mu": 0.8}),
        "mu = 0": ({"mu": 0.0}, "fedavg+ft", {}),
    }

    server_init = FedProx.server_init
    local = FedProx.local
    round = FedProx.round

    def personal(self, me: ClientContext, w: Params) -> Params:
        return me.sgd(w, epochs=self.tune_epochs)
