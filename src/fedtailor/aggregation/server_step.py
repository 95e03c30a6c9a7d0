"""Server optimizers: the mean change of the clients' models as a gradient. Reddi et al., ICLR 2021, Algorithm 2.

Momentum is FedAvgM (Hsu et al., 2019). They apply to any model that an algorithm averages; its text is as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedtailor.core.trees import Params, Tree

ServerOptimizerName = Literal["none", "momentum", "adam", "yogi"]


@dataclass(frozen=True)
class ServerOptimizer:
    """From the model that was sent out and the mean of those that came back to the next model."""

    name: ServerOptimizerName = "momentum"
    lr: float = 1.0
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def step(self, sent: Params, mean: Params, memory: Tree) -> tuple[Params, Tree]:
        """One step of every parameter; `memory` is None at first."""
        first = {
            "m": {k: torch.zeros_like(v) for k, v in sent.items()},
            "v": {k: torch.full_like(v, self.tau**2) for k, v in sent.items()},
        }
        memory = first if memory is None else memory
        change = {k: mean[k] - v for k, v in sent.items()}
        if self.name == "momentum":
            m = {k: self.momentum * memory["m"][k] + d for k, d in change.items()}
            return {k: v + self.lr * m[k] for k, v in sent.items()}, memory | {"m": m}
        m = {k: self.momentum * memory["m"][k] + (1 - self.momentum) * d for k, d in change.items()}
        v = {k: self._second(memory["v"][k], d.square()) for k, d in change.items()}
        new = {k: w + self.lr * m[k] / (v[k].sqrt() + self.tau) for k, w in sent.items()}
        return new, {"m": m, "v": v}

    def _second(self, v: Tensor, square: Tensor) -> Tensor:
        if self.name == "yogi":
            return v - (1 - self.beta2) * square * torch.sign(v - square)
        return self.beta2 * v + (1 - self.beta2) * square
