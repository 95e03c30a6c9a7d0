"""DUW-FedAvg: DUW's learned weights on FedAvg's models. Nakai-Kasai, Wadayama, 2024, Algorithm 3."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared import unfolding
from fedtailor.algorithms._shared.duw import DUW
from fedtailor.core.algorithm import MODEL, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import LocalSolver
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class DUWFedAvg(DUW):
    """FedAvg with learned weights, or with mu FedProx; without outer iterations it is FedAvg or FedProx."""

    title: ClassVar[str] = "DUW-FedAvg"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "nothing learned": ({"outer_iterations": 0}, "fedavg", {}),
        "nothing learned, with mu": ({"outer_iterations": 0, "outer": "final", "mu": 0.5}, "fedprox", {"mu": 0.5}),
    }

    def check_solver(self, solver: LocalSolver) -> None:
        unfolding.check_solver(self.outer, solver)

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, me.sgd(w, epochs=self.epochs, prox=(w, self.mu) if self.mu else None)

    def rates(self, fed: Federation, rows: Sequence[int], here: Collection[int]) -> Tensor:
        return torch.full_like(fed.samples(rows), fed.solver.lr_in(fed.round))

    def models(self, fed: Federation, w: Params, rates: Tensor) -> PerClient:
        return fed.map(self.local, w)
