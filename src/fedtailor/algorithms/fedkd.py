"""FedKD: a private mentor and a common mentee distil into each other. Wu et al., Nature Communications 2022.

Symbols: mentor the private model (t), mentee the common one (s); H features of each; W_h a private map from features
of the mentee to those of the mentor; T the share of energy that is left of an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.heads import check_dense_head, weight_of_head
from fedtailor.algorithms._shared.own_loss import beside, without_prefix
from fedtailor.algorithms.apfl import own_statistics
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fml import taught
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

MENTOR, W_H = "fedkd.mentor", "fedkd.w_h"


@dataclass(frozen=True)
class FedKD(Algorithm):
    """Both models take every step together; updates of the mentee are reduced to their largest singular values."""

    epochs: int = 1
    """Local epochs per round, of both models."""
    distil: float = 1.0
    """Weight of what each model learns from the other; 0 is Local."""
    energy_start: float = 0.95
    """Share of the squared singular values that is left of an update in the first round; 1 leaves all."""
    energy_end: float = 0.98
    """The same in round `horizon` and later."""
    horizon: int = 100
    """Rounds in which the share goes from one to the other."""

    title: ClassVar[str] = "FedKD"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "a whole personal model, the map between features"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "distil = 0": ({"distil": 0.0}, "local", {}, "dense"),
    }
    citation: ClassVar[str] = """@article{wu2022communication,
  title={Communication-Efficient Federated Learning via Knowledge Distillation},
  author={Wu, Chuhan and Wu, Fangzhao and Lyu, Lingjuan and Huang, Yongfeng and Xie, Xing},
  journal={Nature Communications}, volume={13}, year={2022}
}"""

    server_init = FedAvg.server_init

    def check(self, model: Model, task: str) -> None:
        if task != "classification":
            raise ConfigError(f"algorithm.name: FedKD compares probabilities of classes; it does not serve {task}")
        check_dense_head(model, self.title)
        if not 0 < self.energy_start <= self.energy_end <= 1 or self.horizon < 1 or self.distil < 0:
            raise ConfigError(
                "algorithm: FedKD needs 0 < energy_start <= energy_end <= 1, horizon above 0 and distil of 0 or more"
            )

    def client_init(self, me: ClientContext) -> Params:
        like = weight_of_head(me.model)
        k = like.shape[1]
        w_h = torch.from_numpy(stream("fedkd", "w_h").uniform(-(k**-0.5), k**-0.5, (k, k))).to(like)
        return me.model.trainable | {W_H: w_h}

    def onboard_init(self, me: ClientContext, mentee: Params) -> Params:
        return self.client_init(me) | {k: mentee[k] for k in me.model.trainable}

    def energy(self, round: int) -> float:
        """T of a round."""
        return self.energy_start + min(round / self.horizon, 1) * (self.energy_end - self.energy_start)

    def mutual(self, me: ClientContext, mentee: Params, epochs: int) -> Params:
        def loss(t: Params, x: Tree, y: Tensor) -> Tensor:
            s = {k: t[k] for k in (*me.model.params, *me.model.private_buffers)}
            s, w = own_statistics(me.model, s, s | without_prefix(MENTOR, t))
            (H_s, y_s), (H_t, y_t) = (me.model.features_and_outputs(m, x, training=True) for m in (s, w))
            L_s, L_t = me.experiment.loss(y_s, y), me.experiment.loss(y_t, y)
            # each model's loss takes the other model as it is
            by_t = taught(y_t, y_s) + (H_t - H_s.detach() @ t[W_H].T).square().mean(1)
            by_s = taught(y_s, y_t) + (H_t.detach() - H_s @ t[W_H].T).square().mean(1)
            tiny = torch.finfo(L_s.dtype).eps
            by_t, by_s = by_t / (L_t + L_s.detach() + tiny), by_s / (L_s + L_t.detach() + tiny)
            return L_t + L_s + self.distil * (by_t + by_s)

        mine = {k: v for k, v in me.state.items() if k != W_H}
        return me.sgd(mentee | beside(MENTOR, mine) | {W_H: me.state[W_H]}, epochs=epochs, loss=loss)

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, mentee: Params) -> tuple[Tree, Tree]:
        trained = self.mutual(me, mentee, self.epochs)
        sent = reduced(mentee, {k: trained[k] for k in mentee}, self.energy(me.round))
        return without_prefix(MENTOR, trained) | {W_H: trained[W_H]}, (sent, me.n)

    def round(self, fed: Federation, mentee: Params) -> Params:
        return reduced(mentee, fed.mean(*fed.map(self.local, mentee)), self.energy(fed.round))

    def personal(self, me: ClientContext, mentee: Params) -> Params:
        return mentee | {k: v for k, v in me.state.items() if k != W_H}

    def onboard(self, me: ClientContext, mentee: Params, epochs: int) -> Params:
        return mentee | without_prefix(MENTOR, self.mutual(me, mentee, epochs))


def reduced(old: Params, new: Params, energy: float) -> Params:
    """`new` with the update of every matrix by its largest singular values, as many as exceed the share of energy."""
    if energy >= 1:
        return new
    return {k: old[k] + largest(v - old[k], energy) if v.dim() > 1 else v for k, v in new.items()}


def largest(update: Tensor, energy: float) -> Tensor:
    """Of a matrix, or of a kernel as a matrix with a row per output."""
    u, sigma, v = torch.linalg.svd(update.flatten(1), full_matrices=False)
    squares = sigma.square()
    is_kept = squares.cumsum(0) - squares <= energy * squares.sum()
    return ((u * (sigma * is_kept)) @ v).reshape(update.shape)
