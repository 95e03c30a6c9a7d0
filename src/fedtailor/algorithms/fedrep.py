"""FedRep: shared body, private head, trained in turn. Collins et al., ICML 2021, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedtailor.core.algorithm import BODY, COUNT, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class FedRep(Algorithm):
    """The head is fitted to the common body first, then the body to the head; only the body is averaged."""

    head_epochs: int = 10
    """Local epochs of the head, with the body frozen."""
    body_epochs: int = 1
    """Local epochs of the body, with the head frozen."""

    title: ClassVar[str] = "FedRep"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "head"
    private: ClassVar[str] = "head"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no head": ({}, "fedavg", {}, "no-head full-batch"),
        "all head": ({"head_epochs": 2}, "local", {"epochs": 2}, "all-head"),
    }
    citation: ClassVar[str] = """@inproceedings{collins2021exploiting,
  title={Exploiting Shared Representations for Personalized Federated Learning},
  author={Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
  booktitle={ICML}, year={2021}
}"""

    def server_init(self, model: Model) -> Params:
        return model.body

    def client_init(self, me: ClientContext) -> Params:
        return me.model.head

    @on_client(sends=(BODY.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, body: Params) -> tuple[Tree, Tree]:
        head = me.sgd(me.state, epochs=self.head_epochs, frozen=body)
        body = me.sgd(body, epochs=self.body_epochs, frozen=head)
        return head, (body, me.n)

    def round(self, fed: Federation, body: Params) -> Params:
        return fed.mean(*fed.map(self.local, body))

    def personal(self, me: ClientContext, body: Params) -> Params:
        return body | me.state

    def shares(self, me: ClientContext, body: Params) -> Params:
        return {k: torch.full_like(v, float(k in body)) for k, v in me.model.trainable.items()}
