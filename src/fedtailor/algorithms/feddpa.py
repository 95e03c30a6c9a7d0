"""FedDPA: a common and a private adapter, weighted per sample. Yang et al., NeurIPS 2024, FedDPA-T.

Symbols: w common adapters, with all else that is trained; v own adapters; alpha share of v, for a sample `scale` times
the mean cosine between its outputs and those of training samples, with v alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.algorithms._shared.lora_parts import Adapter, check_dense_adapters, mixed_outputs, names
from fedtailor.algorithms._shared.own_loss import beside, some_samples, without_prefix
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree

V, REFERENCE = "feddpa.v", "feddpa.reference"


@dataclass(frozen=True)
class FedDPA(Algorithm):
    """In every round v learns beside the common adapters, which stay; then w alone, as in FedAvg."""

    epochs: int = 1
    """Local epochs per round, of the common adapters."""
    own_epochs: int = 1
    """Local epochs of the private adapters per round; 0 is FedAvg."""
    share: float = 0.5
    """Weight of the private adapters during their training."""
    scale: float = 0.5
    """Largest weight of the private adapters in prediction (lambda); 0 predicts as FedAvg does."""
    samples: int = 5
    """Training samples that a sample is compared with (S)."""

    title: ClassVar[str] = "FedDPA"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "layers"
    private: ClassVar[str] = "second adapters"
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "scale = 0": ({"scale": 0.0}, "fedavg", {}, "adapters full-batch"),
    }
    citation: ClassVar[str] = """@inproceedings{yang2024dual,
  title={Dual-Personalizing Adapter for Federated Foundation Models},
  author={Yang, Yiyuan and Long, Guodong and Shen, Tao and Jiang, Jing and Blumenstein, Michael},
  booktitle={NeurIPS}, year={2024}
}"""

    server_init, round = FedAvg.server_init, FedAvg.round

    def check(self, model: Model, task: str) -> None:
        check_dense_adapters(model, self.title)

    def client_init(self, me: ClientContext) -> Params:
        return {k: me.model.trainable[k] for k in names(me.model)}

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        v = self.train_adapters(me, w, self.own_epochs)
        return v, (me.sgd(w, epochs=self.epochs), me.n)

    def train_adapters(self, me: ClientContext, w: Params, epochs: int) -> Params:
        """The own adapters after training beside the common ones."""

        def loss(t: Params, x: Tree, y: Tensor) -> Tensor:
            return me.experiment.loss(self.outputs(me.model, t, x, self.share, training=True), y)

        if not epochs:
            return dict(me.state)
        return without_prefix(V, me.sgd(beside(V, me.state), epochs=epochs, frozen=w, loss=loss))

    def outputs(self, model: Model, t: Params, x: Tree, alpha: float | Tensor, *, training: bool = False) -> Tensor:
        """Of the model with a blend of both adapters; alpha is a number, or one for each sample."""
        v = without_prefix(V, t)

        def mix(layer: str, adapter: Adapter, h: Tensor) -> Tensor:
            share = alpha.reshape(-1, *[1] * (h.dim() - 1)) if isinstance(alpha, Tensor) else alpha
            return (1 - share) * adapter.change(t, h) + share * adapter.change(v, h)

        return mixed_outputs(model, t, x, mix, training=training)

    def personal(self, me: ClientContext, w: Params) -> Params:
        own = w | beside(V, me.state)
        x, _, mask = some_samples(me, self.samples)
        if not len(mask):
            return own | {REFERENCE: me.n.new_zeros(me.experiment.data.outputs)}
        direction = normalize(self.outputs(me.model, me.buffers | own, x, 1.0), dim=1)
        mean = (direction * mask[:, None]).sum(0) / mask.sum().clamp(min=1)  # of cosines: the cosines' mean is linear
        return own | {REFERENCE: mean}

    def predict(self, model: Model, personal: Params, x: Tree) -> Tensor:
        like = normalize(self.outputs(model, personal, x, 1.0), dim=1) @ personal[REFERENCE]
        return self.outputs(model, personal, x, self.scale * like)

    def onboard(self, me: ClientContext, w: Params, epochs: int) -> Params:
        me.state = self.train_adapters(me, w, epochs)
        return self.personal(me, w)

    def shares(self, me: ClientContext, w: Params) -> Params:
        return {k: torch.full_like(v, 1 - self.scale if k in me.state else 1.0) for k, v in me.model.trainable.items()}
