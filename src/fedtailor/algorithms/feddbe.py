"""FedDBE: a private bias of the client's features. Zhang et al., NeurIPS 2023, Algorithm 1, on FedAvg.

Symbols: z_g features before the head, whose mean at a client is drawn to z_bar, their mean over all clients after the
first round; z_p the client's own part (its representation bias memory), which the head sees added to z_g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.heads import check_dense_head, weight_of_head
from fedtailor.algorithms._shared.own_loss import some_samples
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree

MEAN = ReplySpec("mean features", lambda algorithm, model: algorithm.server_init(model)["z_bar"])
Z_P, Z_BAR, SOME, COUNTED = "feddbe.z_p", "feddbe.z_bar", "feddbe.some", "feddbe.counted"


@dataclass(frozen=True)
class FedDBE(Algorithm):
    """The whole model is averaged; mean features are alike at all clients, and an own vector makes up for it."""

    epochs: int = 1
    """Local epochs per round."""
    kappa: float = 1.0
    """Weight of the pull of a client's mean features towards the common mean; keep local.lr times kappa small."""
    samples: int = 32
    """Samples per client, drawn in each round, for the mean features."""

    title: ClassVar[str] = "FedDBE"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "features"
    private: ClassVar[str] = "a bias of the features"
    needs_tensor: ClassVar[bool] = True
    citation: ClassVar[str] = """@inproceedings{zhang2023eliminating,
  title={Eliminating Domain Bias for Federated Learning in Representation Space},
  author={Zhang, Jianqing and Hua, Yang and Cao, Jian and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and
    Guan, Haibing},
  booktitle={NeurIPS}, year={2023}
}"""

    def check(self, model: Model, task: str) -> None:
        check_dense_head(model, self.title)

    def server_init(self, model: Model) -> Tree:
        z_bar = torch.zeros_like(weight_of_head(model)[0])
        return {"w": model.params, "z_bar": z_bar, "is_known": z_bar.new_zeros((), dtype=torch.bool)}

    def client_init(self, me: ClientContext) -> Tree:
        return {"z_p": torch.zeros_like(weight_of_head(me.model)[0])}

    @on_client(sends=(MODEL.weighted_by(COUNT), MEAN.weighted_by(COUNT), COUNT))
    def first(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        w, (x, _, mask) = me.sgd(w, epochs=self.epochs), me.train
        z_g, _ = me.model.features_and_outputs(me.buffers | w, x)
        return me.state, (w, mask @ z_g / me.n, me.n)

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params, z_bar: Tensor) -> tuple[Tree, Tree]:
        some, _, counted = some_samples(me, self.samples)

        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            output = self.predict(me.model, t, x, training=True)
            z_g, _ = me.model.features_and_outputs(t, t[SOME])
            apart = t[COUNTED] @ z_g / t[COUNTED].sum() - t[Z_BAR]
            return me.experiment.loss(output, y) + self.kappa / 2 * apart.square().mean()

        frozen = {Z_BAR: z_bar, SOME: some, COUNTED: counted}
        trained = me.sgd(w | {Z_P: me.state["z_p"]}, epochs=self.epochs, frozen=frozen, loss=loss)
        return {"z_p": trained[Z_P]}, ({k: trained[k] for k in w}, me.n)

    def round(self, fed: Federation, server: Tree) -> Tree:
        if not server["is_known"]:
            w, mean, n = fed.map(self.first, server["w"])
            return {"w": fed.mean(w, n), "z_bar": fed.mean(mean, n), "is_known": torch.ones_like(server["is_known"])}
        return server | {"w": fed.mean(*fed.map(self.local, server["w"], server["z_bar"]))}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["w"] | {Z_P: me.state["z_p"]}

    def predict(self, model: Model, personal: Params, x: Tensor, training: bool = False) -> Tensor:
        def debiased(z_g: Tensor) -> Tensor:
            return z_g + personal[Z_P]

        return model.features_and_outputs(personal, x, training=training, change=debiased)[1]

    def onboard(self, me: ClientContext, server: Tree, epochs: int) -> Params:
        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            return me.experiment.loss(self.predict(me.model, t, x, training=True), y)

        return server["w"] | me.sgd({Z_P: me.state["z_p"]}, epochs=epochs, frozen=server["w"], loss=loss)
