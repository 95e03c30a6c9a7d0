"""FedAdp: clients whose updates agree with the mean update count more. Wu, Wang, 2021, Algorithm 1.

Symbols: phi angle between a client's move and the mean move, smoothed over the rounds it took part in; alpha constant;
Gompertz function f(phi) = alpha (1 - exp(-exp(-alpha (phi - 1)))); weight n exp(f).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, flat, wide, widest


@dataclass(frozen=True)
class FedAdp(Algorithm):
    """FedAvg with weights by the angle of each client's move."""

    epochs: int = 1
    """Local epochs per round."""
    alpha: float = 5.0
    """Steepness of the Gompertz function."""

    title: ClassVar[str] = "FedAdp"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    stale: ClassVar[bool] = True
    by_client: ClassVar[tuple[str, ...]] = ("angles", "rounds")
    citation: ClassVar[str] = """@article{wu2021fast,
  title={Fast-Convergent Federated Learning with Adaptive Weighting},
  author={Wu, Hongda and Wang, Ping},
  journal={IEEE Trans. Cogn. Commun. Netw.}, volume={7}, number={4}, year={2021}
}"""

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params}

    local: ClassVar[Any] = FedAvg.local

    def round(self, fed: Federation, server: Tree) -> Tree:
        none = fed.model.like.new_zeros(fed.clients, dtype=widest(fed.model.device))
        w, angles, rounds = server["w"], server.get("angles", none), server.get("rounds", none)
        models, n = fed.map(self.local, w)
        each, counts = fed.gather(models, "models"), fed.gather(n, "sample counts")
        moves = flat({k: wide(each[k] - w[k]) for k in fed.model.trainable}, stacked=True)
        mean = wide(counts / counts.sum()) @ moves
        cosine = (moves @ mean) / (moves.norm(dim=1) * mean.norm()).clamp(min=1e-30)
        at = fed.places(models.clients)
        rounds = rounds.index_add(0, at, torch.ones_like(at, dtype=rounds.dtype))
        angle = angles[at] + (cosine.clamp(-1, 1).arccos() - angles[at]) / rounds[at]
        score = self.alpha * (1 - (-(-self.alpha * (angle - 1)).exp()).exp())
        weight = fed.scatter(counts * (score - score.max()).exp().to(counts.dtype))
        angles = angles.index_copy(0, at, angle)
        return {"w": fed.mean(models, weight, stale=w), "angles": angles, "rounds": rounds}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["w"]
