"""DUW-FedNova: DUW's learned weights on FedNova's scaled steps. Nakai-Kasai, Wadayama, 2024, Algorithms 4 and 5.

Symbols: tau local steps; a = |a|_1, what the gradients of one client weigh together; tau_eff steps of all, by samples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared import unfolding
from fedtailor.algorithms._shared.duw import DUW
from fedtailor.algorithms.fednova import FedNova, weight_of_steps
from fedtailor.core.algorithm import MODEL, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import LocalSolver
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class DUWFedNova(DUW):
    """Each client's step size is scaled to tau_eff steps; the models are averaged with learned weights."""

    title: ClassVar[str] = "DUW-FedNova"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "nothing learned, equal steps": ({"outer_iterations": 0}, "fednova", {}, "full-batch"),
    }

    def check_solver(self, solver: LocalSolver) -> None:
        FedNova(mu=self.mu).check_solver(solver)
        unfolding.check_solver(self.outer, solver)

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, w: Params, rate: Tensor) -> tuple[Tree, Tree]:
        return {}, me.sgd(w, epochs=self.epochs, lr=rate, prox=(w, self.mu) if self.mu else None)  # Algorithm 5, line 3

    def rates(self, fed: Federation, rows: Sequence[int], here: Collection[int]) -> Tensor:
        lr, n = fed.solver.lr_in(fed.round), fed.samples(rows)
        a = weight_of_steps(fed.steps(rows, self.epochs), fed.solver.momentum, lr * self.mu)
        arrives = fed.places([int(c in here) for c in rows]).to(n.dtype)  # the others take no steps
        counts = arrives if fed.environment.missing == "renormalise" else torch.ones_like(n)
        tau_eff = (n * a * arrives).sum() / (n * counts).sum().clamp(min=1)
        return lr * tau_eff / a.clamp(min=1)

    def models(self, fed: Federation, w: Params, rates: Tensor) -> PerClient:
        return fed.map(self.local, w, fed.scatter(rates))
