"""DUW-FedNova: DUW's learned weights on FedNova's normalized updates. Nakai-Kasai, Wadayama, 2024, Algorithm 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedtailor.algorithms._shared.duw import DUW
from fedtailor.algorithms.fednova import FedNova
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Params


@dataclass(frozen=True)
class DUWFedNova(DUW):
    """Each client's move is scaled to tau_eff steps before the learned average."""

    outer: Literal["final", "holdout"] = "final"
    """L: training or validation loss at the end. Gradients along the path cannot be recovered from scaled updates."""
    mu: ClassVar[float] = 0.0

    title: ClassVar[str] = "DUW-FedNova"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "nothing learned": ({"outer_iterations": 0}, "fednova", {}, "dense"),
    }
    check_solver: ClassVar[Any] = FedNova.check_solver
    local: ClassVar[Any] = FedNova.local
    weight_of_steps: ClassVar[Any] = FedNova.weight_of_steps

    def models(self, fed: Federation, w: Params) -> PerClient:
        """w + tau_eff / a (w_k - w) of each client; who did not answer took no steps."""
        models, by_weight, times_weight = fed.map(self.local, w)
        n = fed.samples(fed.asked if fed.environment.missing == "stale" else models.clients)
        tau_eff = fed.sum(times_weight) / n.sum()
        n_here = fed.samples(models.clients)
        scale = tau_eff * (fed.gather(by_weight, "steps of each client") / n_here)
        each = fed.gather(models, "model of each client")

        def moved(k: str) -> Any:
            if k not in fed.model.trainable:  # a statistic
                return each[k]
            return w[k] + scale.to(w[k].dtype).reshape(-1, *[1] * w[k].dim()) * (each[k] - w[k])

        return fed.scatter({k: moved(k) for k in w})
