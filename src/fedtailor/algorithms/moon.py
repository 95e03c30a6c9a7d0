"""MOON: features near those of the common model, far from the client's last. Li, He, Song, CVPR 2021, Algorithm 1.

Symbols: w common model; z features of the model in training, z_glob of w, z_prev of the client's model of the round in
which it last took part; tau temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedtailor.algorithms._shared.own_loss import beside, without_prefix
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

GLOB, PREV = "moon.glob", "moon.prev"


@dataclass(frozen=True)
class MOON(Algorithm):
    """FedAvg whose clients add a contrast of models to their loss."""

    epochs: int = 1
    """Local epochs per round."""
    mu: float = 1.0
    """Weight of the contrast; 0 is FedAvg."""
    tau: float = 0.5
    """Temperature of the contrast."""

    title: ClassVar[str] = "MOON"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "nothing"
    private: ClassVar[str] = "its model of the last round, for the contrast"
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mu = 0": ({"mu": 0.0}, "fedavg", {}),
    }
    citation: ClassVar[str] = """@inproceedings{li2021model,
  title={Model-Contrastive Federated Learning},
  author={Li, Qinbin and He, Bingsheng and Song, Dawn},
  booktitle={CVPR}, year={2021}
}"""

    server_init, round, personal = FedAvg.server_init, FedAvg.round, FedAvg.personal

    def check(self, model: Model, task: str) -> None:
        if not model.head or len(model.head) == len(model.params):
            raise ConfigError("model.head: MOON compares the features before the head; this model has none before it")
        if self.tau <= 0:
            raise ConfigError(f"algorithm.tau = {self.tau}: MOON needs a temperature above 0")

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    def onboard_init(self, me: ClientContext, w: Params) -> Params:
        return dict(w)

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        def loss(t: Params, x: Tree, y: Tensor) -> Tensor:
            statistics = {k: t[k].clone() for k in me.model.private_buffers}  # the model in training writes its own
            z, output = me.model.features_and_outputs(t, x, training=True)
            z_glob, z_prev = (me.model.features(statistics | without_prefix(k, t), x) for k in (GLOB, PREV))
            near, far = (cosine_similarity(z, other) / self.tau for other in (z_glob, z_prev))
            return me.experiment.loss(output, y) + self.mu * softplus(far - near)  # -log(e^near / (e^near + e^far))

        new = me.sgd(w, epochs=self.epochs, frozen=beside(GLOB, w) | beside(PREV, me.state), loss=loss)
        return new, (new, me.n)
