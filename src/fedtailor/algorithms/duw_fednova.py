"""DUW-FedNova: DUW's learned weights on FedNova's normalised moves. Nakai-Kasai, Wadayama, 2024, Algorithm 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedtailor.algorithms.duw_fedavg import DUWFedAvg
from fedtailor.algorithms.fednova import FedNova
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.federation import Federation, Placed
from fedtailor.core.trees import Params


@dataclass(frozen=True)
class DUWFedNova(Algorithm):
    """Each client's move is scaled to tau_eff steps before the learned average."""

    epochs: int = 1
    """Local epochs per round."""
    horizon: int = 10
    """T: rounds that are unfolded; later ones use the weights of the last."""
    outer_iterations: int = 50
    """M: how often these rounds are run to learn theta, before the first round of the run."""
    outer_lr: float = 0.005
    """Step size of theta (Adam)."""
    outer: Literal["final", "holdout"] = "final"
    """L: training or validation loss at the end."""
    gradient: Literal["first-order", "exact"] = "first-order"
    """Local moves taken as constants, in closed form (paper); or through the local steps."""
    weights: Literal["table", "rule"] = "table"
    """A weight for each client and round (paper), or a rule of what the server sees, which carries over to others."""
    mu: ClassVar[float] = 0.0

    title: ClassVar[str] = "DUW-FedNova"
    stale: ClassVar[bool] = True
    by_client: ClassVar[tuple[str, ...]] = DUWFedAvg.by_client
    citation: ClassVar[str] = DUWFedAvg.citation

    preparation: ClassVar[Any] = DUWFedAvg.preparation
    check: ClassVar[Any] = DUWFedAvg.check
    check_solver: ClassVar[Any] = FedNova.check_solver
    server_init: ClassVar[Any] = DUWFedAvg.server_init
    round: ClassVar[Any] = DUWFedAvg.round
    first: ClassVar[Any] = DUWFedAvg.first
    outer_iteration: ClassVar[Any] = DUWFedAvg.outer_iteration
    average: ClassVar[Any] = DUWFedAvg.average
    outer_loss: ClassVar[Any] = DUWFedAvg.outer_loss
    end: ClassVar[Any] = DUWFedAvg.end
    end_and_slope: ClassVar[Any] = DUWFedAvg.end_and_slope
    personal: ClassVar[Any] = DUWFedAvg.personal
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
            return w[k] + scale.to(rows.dtype).reshape(-1, *[1] * w[k].dim()) * (rows - w[k])

        return Placed(models.clients, {k: moved(k) for k in w})
