"""Per-FedAvg: a common model that is good after one local step. Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, Algorithm 1.

Symbols: w common model; alpha step size of the own step; F_i(w) = f_i(w - alpha grad f_i(w)), whose mean is minimised;
D the samples of the inner gradient, D' those of the outer one. beta, the step size of w, is that of local training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

X, Y, NEXT = "per-fedavg.x", "per-fedavg.y", "per-fedavg.next"


@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """Local steps on the loss after one step more; a client predicts after that step."""

    epochs: int = 1
    """Local epochs per round."""
    alpha: float = 0.01
    """Learning rate of the adaptation step; 0 is FedAvg."""
    order: Literal["exact", "first"] = "exact"
    """With second derivatives, or first-order only (FO)."""

    title: ClassVar[str] = "Per-FedAvg"
    learns: ClassVar[str] = "adaptation"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the model after the own step"
    needs_tensor: ClassVar[bool] = True
    onboards_fitted: ClassVar[bool] = True
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "alpha = 0": ({"alpha": 0.0}, "fedavg", {}),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {"first-order": {"order": "first"}}
    citation: ClassVar[str] = """@inproceedings{fallah2020personalized,
  title={Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach},
  author={Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman},
  booktitle={NeurIPS}, year={2020}
}"""

    server_init, round = FedAvg.server_init, FedAvg.round

    def check(self, model: Model, task: str) -> None:
        if self.alpha < 0:
            raise ConfigError("algorithm: Per-FedAvg needs alpha of at least 0")

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        x, y, mask = me.train

        def loss(t: Params, x: Tensor, y: Tensor, weight: Tensor, index: Tensor) -> Tensor:
            rows = t[NEXT][index]  # D of this step, as many as D' and others
            w = {k: t[k] for k in me.model.trainable}
            rest = {k: t[k] for k in (*me.model.params, *me.model.private_buffers) if k not in w}
            constant = {k: v.clone() for k, v in rest.items()}  # D' writes statistics, D only reads them

            def inner(w: Params) -> Tensor:
                losses = me.experiment.loss(me.model(constant | w, t[X][rows]), t[Y][rows])
                return (losses * weight).sum() / weight.sum().clamp(min=1)

            slope = torch.func.grad(inner)(w)
            slope = slope if self.order == "exact" else {k: g.detach() for k, g in slope.items()}
            own = {k: v - self.alpha * slope[k] for k, v in w.items()}
            return me.experiment.loss(me.model(rest | own, x, training=True), y)

        after = partners(me.uniform(len(y)), mask)
        trained = me.sgd(w, epochs=self.epochs, frozen={X: x, Y: y, NEXT: after}, loss=loss)
        return {}, (trained, me.n)

    def personal(self, me: ClientContext, w: Params) -> Params:
        slope = torch.func.grad(lambda own: me.loss(w | own))({k: w[k] for k in me.model.trainable})
        return w | {k: w[k] - self.alpha * g for k, g in slope.items()}


def partners(order: Tensor, mask: Tensor) -> Tensor:
    """For each sample the next one in a random circle of all: a batch and its partners share few samples, or none."""
    circle = torch.where(mask > 0, order, torch.inf).argsort()
    count = mask.sum().long().clamp(min=1)
    return circle[(circle.argsort() + 1) % count]
