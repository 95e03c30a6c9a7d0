"""FedSA-LoRA: the factors A of all adapters are shared, B stays private. Guo et al., ICLR 2025, section 3.

A learns what is common, B what is a client's own; the head, where it is trained, stays with B as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms._shared.lora_parts import B, check_adapters, names
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import COUNT, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree

SHARED = ReplySpec("factors A", lambda algorithm, model: algorithm.server_init(model))


@dataclass(frozen=True)
class FedSALoRA(Algorithm):
    """A and B take every local step together; only A is averaged."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "FedSA-LoRA"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "layers"
    private: ClassVar[str] = "factors B, head"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "alone": ({}, "local", {}, "adapters one-client"),
    }
    citation: ClassVar[str] = """@inproceedings{guo2025selective,
  title={Selective Aggregation for Low-Rank Adaptation in Federated Learning},
  author={Guo, Pengxin and Zeng, Shuang and Wang, Yanran and Fan, Huijie and Wang, Feifei and Qu, Liangqiong},
  booktitle={ICLR}, year={2025}
}"""

    round, personal, shares = FedRep.round, FedRep.personal, FedRep.shares

    def check(self, model: Model, task: str) -> None:
        check_adapters(model, self.title)

    def server_init(self, model: Model) -> Params:
        kept = {*names(model, B), *model.head}
        return {k: v for k, v in model.params.items() if k not in kept}

    def client_init(self, me: ClientContext) -> Params:
        kept = {*names(me.model, B), *me.model.head}
        return {k: v for k, v in me.model.params.items() if k in kept}

    @on_client(sends=(SHARED.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, shared: Params) -> tuple[Tree, Tree]:
        w = me.sgd(shared | me.state, epochs=self.epochs)
        return {k: w[k] for k in me.state}, ({k: w[k] for k in shared}, me.n)
