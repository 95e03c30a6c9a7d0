"""FedLAW: learned aggregation weights and shrinking factor. Li et al., ICML 2023, section 4.

Symbols: w = gamma * sum lam_i w_i common model; w_i trained by client i; lam weights on the simplex, softmax of x;
gamma = exp(y) shrinking factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.unfolding import adam, learnable
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class FedLAW(Algorithm):
    """FedAvg whose weights, and a common factor, descend the clients' validation loss in every round."""

    epochs: int = 1
    """Local epochs per round."""
    server_steps: int = 10
    """Updates of the weights per round, two trips each; 0 is FedAvg."""
    server_lr: float = 0.01
    """Step size of the weights (Adam)."""
    shrink: bool = True
    """Whether gamma is learned; otherwise it is 1."""

    title: ClassVar[str] = "FedLAW"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "nothing"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no steps of the server": ({"server_steps": 0}, "fedavg", {}),
        "no validation samples": ({}, "fedavg", {}, "no-validation"),
    }
    citation: ClassVar[str] = """@inproceedings{li2023revisiting,
  title={Revisiting Weighted Aggregation in Federated Learning with Neural Networks},
  author={Li, Zexi and Lin, Tao and Shang, Xinyi and Wu, Chao},
  booktitle={ICML}, year={2023}
}"""

    server_init, personal = FedAvg.server_init, FedAvg.personal
    local: ClassVar[Any] = FedAvg.local

    @on_client(sends=(NUMBER.summed(), NUMBER.summed()))
    def judge(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        count = me.val.mask.sum()
        return me.state, (count * me.loss(w, "val"), count)

    def round(self, fed: Federation, w: Params) -> Params:
        replies, n = fed.map(self.local, w)
        models, n = fed.gather(replies, "model of each client"), fed.gather(n, "sample counts")
        xy = learnable(torch.cat([n.log(), torch.zeros_like(n[:1])]))  # begin as FedAvg
        for _ in range(self.server_steps):
            losses, counts = fed.map(self.judge, self.average(fed.model, models, fed.tape(xy["x"])))
            gradient = fed.backward(fed.sum(losses) / fed.sum(counts).clamp(min=1))
            xy = adam(xy, gradient, self.server_lr)
        fed.report(gamma=self.gamma(xy["x"]), weights=[*xy["x"][:-1].softmax(0)])
        return self.average(fed.model, models, xy["x"])

    def gamma(self, xy: Tensor) -> Tensor:
        return xy[-1].exp() if self.shrink else torch.ones_like(xy[-1])

    def average(self, model: Model, models: Params, xy: Tensor) -> Params:
        mean = {k: torch.tensordot(xy[:-1].softmax(0), v, dims=1) for k, v in models.items()}
        return mean | {k: self.gamma(xy) * mean[k] for k in model.trainable}  # a shrunk variance would be none
