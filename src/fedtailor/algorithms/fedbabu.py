"""FedBABU: a body trained under a fixed initial head, then fine-tuned. Oh et al., ICLR 2022, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import BODY, COUNT, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class FedBABU(Algorithm):
    """In the rounds the head stays at its common random start; a client predicts after fine-tuning body and head."""

    epochs: int = 1
    """Local epochs of the body per round."""
    tune_epochs: int = 5
    """Epochs of fine-tuning, of body and head, before a client predicts."""

    title: ClassVar[str] = "FedBABU"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the fine-tuned model"
    onboards_fitted: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no fine-tuning": (
            {"tune_epochs": 0, "epochs": 2},
            "fedrep",
            {"head_epochs": 0, "body_epochs": 2},
            "full-batch",
        ),
        "no head": ({}, "fedavg+ft", {}, "no-head"),
    }
    citation: ClassVar[str] = """@inproceedings{oh2022fedbabu,
  title={{FedBABU}: Toward Enhanced Representation for Federated Image Classification},
  author={Oh, Jaehoon and Kim, Sangmook and Yun, Se-Young},
  booktitle={ICLR}, year={2022}
}"""

    server_init = FedRep.server_init
    round = FedRep.round

    @on_client(sends=(BODY.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, body: Params) -> tuple[Tree, Tree]:
        return {}, (me.sgd(body, epochs=self.epochs, frozen=me.model.head), me.n)

    def personal(self, me: ClientContext, body: Params) -> Params:
        return me.sgd(body | me.model.head, epochs=self.tune_epochs)
