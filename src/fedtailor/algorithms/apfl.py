"""APFL: a mixture of the common and a private model, with a learned weight. Deng et al., 2020, Algorithm 1.

Symbols: w common model; v own model; alpha share of the own one; v_bar = alpha v + (1 - alpha) w, with which a client
predicts. Only parameters are blended, statistics of BatchNorm are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.own_loss import beside, task_losses, without_prefix
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

V, ALPHA = "apfl.v", "apfl.alpha"


@dataclass(frozen=True)
class APFL(Algorithm):
    """The common model is trained as in FedAvg; in the same steps v is, on the loss of v_bar."""

    epochs: int = 1
    """Local epochs per round, of both models."""
    alpha: float = 0.5
    """Initial weight of the private model: 0 is FedAvg, 1 is Local."""
    alpha_lr: float = 0.1
    """Learning rate of alpha, which takes one step per round; 0 keeps it fixed."""

    title: ClassVar[str] = "APFL"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "an own model and its share"
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "alpha = 0": ({"alpha": 0.0, "alpha_lr": 0.0}, "fedavg", {}),
        "alpha = 1": ({"alpha": 1.0, "alpha_lr": 0.0}, "local", {}),
    }
    citation: ClassVar[str] = """@article{deng2020adaptive,
  title={Adaptive Personalized Federated Learning},
  author={Deng, Yuyang and Kamani, Mohammad Mahdi and Mahdavi, Mehrdad},
  journal={arXiv:2003.13461}, year={2020}
}"""

    server_init, round = FedAvg.server_init, FedAvg.round

    def check(self, model: Model, task: str) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"algorithm.alpha = {self.alpha}: must be between 0 and 1")

    def client_init(self, me: ClientContext) -> Tree:
        return {"v": me.model.trainable, "alpha": torch.full_like(me.n, self.alpha)}

    def onboard_init(self, me: ClientContext, w: Params) -> Tree:
        return self.client_init(me) | {"v": {k: w[k] for k in me.model.trainable}}

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        v, alpha = me.state["v"], me.state["alpha"]
        slope = torch.func.grad(lambda a: me.loss(blend(v, w, a)))(alpha)
        alpha = (alpha - self.alpha_lr * slope).clamp(0, 1)

        def both(t: Params, x: Tensor, y: Tensor) -> Tensor:
            w = {k: t[k] for k in (*me.model.params, *me.model.private_buffers)}
            v_bar = blend(without_prefix(V, t), {k: u.detach() for k, u in w.items()}, t[ALPHA])
            w, v_bar = own_statistics(me.model, w, v_bar)
            return task_losses(me, w, x, y, training=True) + task_losses(me, v_bar, x, y, training=True)

        trained = me.sgd(w | beside(V, v), epochs=self.epochs, frozen={ALPHA: alpha}, loss=both)
        return {"v": without_prefix(V, trained), "alpha": alpha}, ({k: trained[k] for k in w}, me.n)

    def personal(self, me: ClientContext, w: Params) -> Params:
        return blend(me.state["v"], w, me.state["alpha"])

    def shares(self, me: ClientContext, w: Params) -> Params:
        return {k: (1 - me.state["alpha"]).expand_as(u) for k, u in me.model.trainable.items()}


def blend(v: Params, w: Params, alpha: Tensor) -> Params:
    """v_bar, with all else of w."""
    return w | {k: alpha * v[k] + (1 - alpha) * w[k] for k in v}


def own_statistics(model: Model, w: Params, v_bar: Params) -> tuple[Params, Params]:
    """Both, each of which writes its own statistics when it runs: v_bar private ones, w those that are averaged."""
    private = {k: u.clone() for k, u in w.items() if k in model.private_buffers}
    averaged = {k: u.clone() for k, u in v_bar.items() if k in model.params and k not in model.trainable}
    return w | private, v_bar | averaged
