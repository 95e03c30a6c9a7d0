"""DUW-FedNova: DUW's learned weights on FedNova's normalised moves. Nakai-Kasai, Wadayama, 2024, Algorithm 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedtailor.algorithms.duw import DUW
from fedtailor.algorithms.fednova import FedNova
from fedtailor.core.federation import Federation, Placed
from fedtailor.core.trees import Params


@dataclass(frozen=True)
class DUWFedNova(DUW):
    """Each client's move is scaled to tau_eff steps before the learned average."""

    outer: Literal["final", "holdout"] = "final"
    """L: training or validation loss at the end. The path's gradients cannot be read off scaled moves."""
    mu: ClassVar[float] = 0.0

    title: ClassVar[str] = "DUW-FedNova"
    check_solver: ClassVar[Any] = FedNova.check_solver
    local: ClassVar[Any] = FedNova.local
    weight_of_steps: ClassVar[Any] = FedNova.weight_of_steps

    def models(self, fed: Federation, w: Params) -> Placed:
        """w + tau_eff / a (w_k - w) of each client; who did not answer took no steps."""
        models, by_weight, times_weight = fed.map(self.local, w)
        n = fed.samples(fed.asked if fed.environment.missing == "stale" else models.clients)
        tau_eff = fed.sum(times_weight) / n.sum()
        n_here = fed.samples(models.clients)
        scale = tau_eff * (by_weight.tree / n_here)

        def moved(k: str) -> Any:
            rows = models.tree[k]
            if k not in fed.engine.setting.model.trainable:  # a statistic
                return rows
            return w[k] + scale.to(rows.dtype).reshape(-1, *[1] * w[k].dim()) * (rows - w[k])

        return Placed(models.clients, {k: moved(k) for k in w})
