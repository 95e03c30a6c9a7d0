"""FedBN: everything is shared except BatchNorm. Li, Jiang, Zhang, Kamp, Dou, ICLR 2021, Algorithm 1.

Symbols: w all parameters, of which a client's state holds those of its BatchNorm layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import COUNT, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

SHARED = ReplySpec("all but BatchNorm", lambda algorithm, model: algorithm.server_init(model), is_model=True)


@dataclass(frozen=True)
class FedBN(Algorithm):
    """All layers take every local step together; weights, biases and statistics of BatchNorm are not averaged."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "FedBN"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "layers"
    private: ClassVar[str] = "BatchNorm"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "alone": ({}, "local", {}, "batchnorm one-client"),
    }
    citation: ClassVar[str] = """@inproceedings{li2021fedbn,
  title={{FedBN}: Federated Learning on Non-{IID} Features via Local Batch Normalization},
  author={Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi},
  booktitle={ICLR}, year={2021}
}"""

    round, personal, shares = FedRep.round, FedRep.personal, FedRep.shares

    def check(self, model: Model, task: str) -> None:
        if not model.batch_statistics:
            raise ConfigError("model.name: FedBN keeps BatchNorm private, but the model has none")

    def server_init(self, model: Model) -> Params:
        return {k: v for k, v in model.params.items() if k not in batch_norm(model)}

    def client_init(self, me: ClientContext) -> Params:
        return batch_norm(me.model)

    @on_client(sends=(SHARED.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, shared: Params) -> tuple[Tree, Tree]:
        w = me.sgd(shared | me.state, epochs=self.epochs)
        return {k: w[k] for k in me.state}, ({k: w[k] for k in shared}, me.n)


def batch_norm(model: Model) -> Params:
    """Initial values of all entries of BatchNorm layers; statistics are among them where `model.buffers` is "mean"."""
    layers = {name for name, part in model.module.named_modules() if isinstance(part, _BatchNorm)}
    return {k: v for k, v in model.params.items() if k.rpartition(".")[0] in layers}
