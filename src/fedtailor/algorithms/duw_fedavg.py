"""DUW-FedAvg: DUW's learned weights on FedAvg's models. Nakai-Kasai, Wadayama, 2024, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms._shared import unfolding
from fedtailor.algorithms._shared.duw import DUW
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.experiment import LocalSolver
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Params


@dataclass(frozen=True)
class DUWFedAvg(DUW):
    """FedAvg with learned weights; without outer iterations it is FedAvg."""

    title: ClassVar[str] = "DUW-FedAvg"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "nothing learned": ({"outer_iterations": 0}, "fedavg", {}),
    }

    def check_solver(self, solver: LocalSolver) -> None:
        unfolding.check_solver(self.outer, solver)

    local: ClassVar[Any] = FedAvg.local

    def models(self, fed: Federation, w: Params) -> PerClient:
        return fed.map(self.local, w)[0]
