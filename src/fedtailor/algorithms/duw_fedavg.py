"""DUW-FedAvg: DUW's learned weights on FedAvg's models. Nakai-Kasai, Wadayama, 2024, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms.duw import DUW
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.federation import Federation, Placed
from fedtailor.core.trees import Params
from fedtailor.local import unfolding
from fedtailor.local.training import Solver


@dataclass(frozen=True)
class DUWFedAvg(DUW):
    """FedAvg with learned weights; without outer iterations it is FedAvg."""

    title: ClassVar[str] = "DUW-FedAvg"

    def check_solver(self, solver: Solver) -> None:
        unfolding.check_solver(self.outer, solver)

    local: ClassVar[Any] = FedAvg.local

    def models(self, fed: Federation, w: Params) -> Placed:
        return fed.map(self.local, w)[0]
