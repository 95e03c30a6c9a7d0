"""FedALA: a client mixes the common model into its own, entry by entry. Zhang et al., AAAI 2023, Algorithm 1.

Symbols: common the model of the server; theta the last layers of a client's own model; W in [0, 1] the weights of the
common entries in them; hat = theta + (common - theta) W, from where local training starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.data import take
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class FedALA(Algorithm):
    """Layers before the last ones are the common ones; for the last a client learns what to take, then trains all."""

    epochs: int = 1
    """Local epochs per round."""
    layers: int = 1
    """Number of last layers that are mixed; 0 is FedAvg."""
    share: float = 0.8
    """Fraction of a client's samples, redrawn in each round, on which W is learned."""
    eta: float = 1.0
    """Learning rate of W; 0 is FedAvg."""
    first_passes: int = 30
    """Maximum passes over these samples, in batches, in the second round, when models first differ; later one."""
    threshold: float = 0.1
    """W has converged when the standard deviation of the losses after the last ten passes is below this."""

    title: ClassVar[str] = "FedALA"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "layers"
    private: ClassVar[str] = "last layers, their weights"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no layers": ({"layers": 0}, "fedavg", {}, "full-batch"),
        "eta = 0": ({"eta": 0.0, "layers": 2}, "fedavg", {}, "full-batch"),
    }
    citation: ClassVar[str] = """@inproceedings{zhang2023fedala,
  title={{FedALA}: Adaptive Local Aggregation for Personalized Federated Learning},
  author={Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and Guan, Haibing},
  booktitle={AAAI}, year={2023}
}"""

    def check(self, model: Model, task: str) -> None:
        if self.layers < 0 or self.first_passes < 1 or not 0 < self.share <= 1:
            raise ConfigError("algorithm: FedALA needs layers >= 0, first_passes >= 1 and share above 0 up to 1")

    def server_init(self, model: Model) -> Tree:
        return {"common": model.params, "rounds": model.like.new_zeros((), dtype=torch.int64)}

    def client_init(self, me: ClientContext) -> Tree:
        theta = last_layers(me.model, self.layers)
        return {"theta": theta, "W": tree_map(torch.ones_like, theta)}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        return self.client_init(me) | {"theta": {k: server["common"][k] for k in last_layers(me.model, self.layers)}}

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def first(self, me: ClientContext, common: Params) -> tuple[Tree, Tree]:
        return self.blend_and_train(me, common, self.first_passes)

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, common: Params) -> tuple[Tree, Tree]:
        return self.blend_and_train(me, common, 1)

    def blend_and_train(self, me: ClientContext, common: Params, passes: int) -> tuple[Tree, Tree]:
        hat, W = self.blend(me, common, passes)
        own = me.sgd(hat, epochs=self.epochs)
        return {"theta": {k: own[k] for k in W}, "W": W}, (own, me.n)

    def blend(self, me: ClientContext, common: Params, passes: int) -> tuple[Params, Params]:
        """The blend, and the weights after these passes, or as many as it takes until they settle."""
        theta, W, (x, y, mask) = me.state["theta"], me.state["W"], me.train
        order, chosen = draw_share(me.uniform(len(y)), mask, self.share)
        size = me.solver.batch_size or max(1, len(y))

        def hat(W: Params) -> Params:
            return common | {k: u + (common[k] - u) * W[k] for k, u in theta.items()}

        def loss(W: Params, rows: Tensor) -> Tensor:
            each = me.experiment.loss(me.model(me.buffers | hat(W), take(x, rows)), y[rows])
            return (each * chosen[rows]).sum() / chosen[rows].sum().clamp(min=1)

        losses: list[Tensor] = []
        value = torch.zeros_like(me.n)
        is_settled = torch.zeros_like(me.n, dtype=torch.bool)
        for _ in range(passes if W else 0):
            for start in range(0, math.ceil(self.share * len(y)), size):
                rows = order[start : start + size]
                moves = ~is_settled & (chosen[rows].sum() > 0)  # in a stack, others may have more batches
                slope, now = torch.func.grad_and_value(loss)(W, rows)
                W = {k: torch.where(moves, (u - self.eta * slope[k]).clamp(0, 1), u) for k, u in W.items()}
                value = torch.where(moves, now, value)
            losses.append(value)
            if len(losses) > 10:
                is_settled = is_settled | (torch.stack(losses[-10:]).std(correction=0) < self.threshold)
        return hat(W), W

    def round(self, fed: Federation, server: Tree) -> Tree:
        step = self.first if server["rounds"] == 1 else self.local
        return {"common": fed.mean(*fed.map(step, server["common"])), "rounds": server["rounds"] + 1}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return self.blend(me, server["common"], 1)[0]

    def shares(self, me: ClientContext, server: Tree) -> Params:
        return tree_map(torch.ones_like, me.model.trainable) | me.state["W"]


def last_layers(model: Model, layers: int) -> Params:
    """Initial values of the parameters of the last modules that have any."""
    names = list(dict.fromkeys(k.rpartition(".")[0] for k in model.trainable))
    return {k: v for k, v in model.trainable.items() if k.rpartition(".")[0] in names[len(names) - layers :]}


def draw_share(order: Tensor, mask: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Samples in a random order, padding last; and 1 for the first of them, a share, at least one, 0 for the others."""
    rows = torch.where(mask > 0, order, torch.inf).argsort()
    chosen = (rows.argsort() < (share * mask.sum()).ceil()).to(mask.dtype) * mask
    return rows, chosen
