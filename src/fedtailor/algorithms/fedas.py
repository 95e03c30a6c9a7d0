"""FedAS: the common body is aligned with a client's features before training. Yang, Huang, Ye, CVPR 2024, Algorithm 1.

Symbols: theta common body; theta_i own body as last trained, phi_i head; mu class means of the features of theta_i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms.fedpac import class_sums
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import BODY, COUNT, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.task import classification_loss
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError

MEANS = "fedas.class means"
AT_ONCE = 64  # samples whose gradients are in memory at a time


@dataclass(frozen=True)
class FedAS(Algorithm):
    """FedPer whose clients keep what their features mean, and count by how much they still have to learn."""

    epochs: int = 1
    """Local epochs of body and head per round."""
    align_epochs: int = 1
    """Epochs to align the common body with the client's class means, before training."""
    align_lr: float | None = None
    """Learning rate of the alignment; local.lr by default (authors' code: 0.01)."""
    weights: Literal["fisher", "samples"] = "fisher"
    """How bodies are averaged: by the trace of the clients' Fisher information, or by their sample counts."""

    title: ClassVar[str] = "FedAS"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "head, own body"
    citation: ClassVar[str] = """@inproceedings{yang2024fedas,
  title={{FedAS}: Bridging Inconsistency in Personalized Federated Learning},
  author={Yang, Xiyuan and Huang, Wenke and Ye, Mang},
  booktitle={CVPR}, year={2024}
}"""

    server_init, round = FedRep.server_init, FedRep.round

    def check(self, model: Model, task: str) -> None:
        if task != "classification":
            raise ConfigError(f"algorithm.name: FedAS compares means of classes; it does not serve {task}")
        if not model.head:
            raise ConfigError("model.head: FedAS aligns the features before the head, but the model has none")

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    def onboard_init(self, me: ClientContext, theta: Params) -> Params:
        return me.model.params | theta

    @on_client(sends=(BODY.weighted_by(COUNT), replace(COUNT, is_free=True)))  # by the Fisher trace
    def local(self, me: ClientContext, theta: Params) -> tuple[Tree, Tree]:
        phi = {k: me.state[k] for k in me.model.head}
        if self.align_epochs:
            sums, counts, _ = class_sums(me, me.state)
            mu = sums / counts.clamp(min=1)[:, None]

            def away(tensors: Params, x: Tensor, y: Tensor) -> Tensor:
                features, _ = me.model.features_and_outputs(tensors, x, training=True)
                return (features - tensors[MEANS][y]).square().mean(1)

            frozen = phi | {MEANS: mu}
            theta = me.sgd(theta, epochs=self.align_epochs, frozen=frozen, lr=self.align_lr, loss=away)
        own = me.sgd(theta | phi, epochs=self.epochs)
        weight = fisher_trace(me, own).clamp(min=1e-12) if self.weights == "fisher" else me.n
        return own, ({k: own[k] for k in theta}, weight)

    def personal(self, me: ClientContext, theta: Params) -> Params:
        return me.state


def fisher_trace(me: ClientContext, params: Params) -> Tensor:
    """Mean over a client's training samples of the squared gradient of the log-likelihood of their labels."""
    x, y, mask = me.train
    trained = {k: v for k, v in params.items() if k in me.model.trainable}
    rest = {k: v for k, v in (me.buffers | params).items() if k not in trained}

    def square(x: Tensor, y: Tensor) -> Tensor:
        def loss(part: Params) -> Tensor:
            return classification_loss(me.model(rest | part, tree_map(lambda v: v[None], x)), y[None]).sum()

        return torch.stack([g.square().sum() for g in torch.func.grad(loss)(trained).values()]).sum()

    squares = torch.func.vmap(square, chunk_size=AT_ONCE)(x, y)
    return torch.where(mask > 0, squares, 0).sum() / mask.sum()
