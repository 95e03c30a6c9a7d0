"""FedPAC: features aligned with class means, heads combined by similarity. Xu, Tong, Huang, ICLR 2023, Algorithm 1.

Symbols: f features before the head; c class means of f over all clients; h p(y) times the class means of f, v the
variance of h, both at one client and under the common body; a weights of the clients' heads in one client's head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared import prototypes
from fedtailor.algorithms._shared.heads import weight_of_head
from fedtailor.algorithms._shared.prototypes import COUNTS, SUMS, class_sums, pulled_losses
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import BODY, COUNT, HEAD, NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics.simplex import least_on_simplex

H = ReplySpec("class means", lambda algorithm, model: torch.zeros_like(weight_of_head(model)))


@dataclass(frozen=True)
class FedPAC(Algorithm):
    """The body is averaged; a client's head is the mean of those heads that suit its own class means best."""

    epochs: int = 1
    """Local epochs of the body per round, with the head frozen."""
    head_epochs: int = 1
    """Local epochs of the head per round, before the body."""
    head_lr: float | None = None
    """Learning rate of the head; local.lr by default (paper: 0.1 beside 0.01)."""
    lam: float = 1.0
    """Weight of the alignment of features with the common mean of their class."""
    collaborate: bool = True
    """Whether heads are combined; if not, they stay private."""

    title: ClassVar[str] = "FedPAC"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "head"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no pull, own heads": (
            {"lam": 0.0, "collaborate": False, "epochs": 2, "head_epochs": 3},
            "fedrep",
            {"body_epochs": 2, "head_epochs": 3},
        ),
        "alone": ({"lam": 0.0}, "fedrep", {"head_epochs": 1}, "one-client"),
    }
    citation: ClassVar[str] = """@inproceedings{xu2023personalized,
  title={Personalized Federated Learning with Feature Alignment and Classifier Collaboration},
  author={Xu, Jian and Tong, Xinyi and Huang, Shao-Lun},
  booktitle={ICLR}, year={2023}
}"""

    client_init = FedRep.client_init

    def check(self, model: Model, task: str) -> None:
        prototypes.check_classes(model, task, self.title)

    def server_init(self, model: Model) -> Tree:
        return {"body": model.body, "c": prototypes.no_prototypes(model)}

    @on_client(sends=(BODY.weighted_by(COUNT), HEAD, H, NUMBER, SUMS.summed(), COUNTS.summed(), COUNT))
    def local(self, me: ClientContext, body: Params, c: Params) -> tuple[Tree, Tree]:
        before = class_sums(me, body | me.state)
        h = before.sums / me.n
        v = ((before.squares / me.n - h.square().sum()) / me.n).clamp(min=0)
        head = me.sgd(me.state, epochs=self.head_epochs, frozen=body, lr=self.head_lr)

        body = me.sgd(body, epochs=self.epochs, frozen=head | c, loss=pulled_losses(me, self.lam))
        after = class_sums(me, body | head)
        return head, (body, head, h, v, after.sums, after.counts, me.n)

    @on_client()
    def adopt(self, me: ClientContext, head: Params) -> tuple[Tree, Tree]:
        return head, None

    def round(self, fed: Federation, server: Tree) -> Tree:
        body, head, h, v, sums, counts, n = fed.map(self.local, server["body"], server["c"])
        if self.collaborate:
            a = collaboration(fed.gather(h, "class means of each client"), fed.gather(v, "their variances"))
            heads = fed.gather(head, "head of each client")
            fed.map(self.adopt, fed.scatter({k: torch.tensordot(a, x, dims=1) for k, x in heads.items()}))
        c = prototypes.renew(server["c"], fed.sum(sums), fed.sum(counts))
        return {"body": fed.mean(body, n), "c": c}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["body"] | me.state


def collaboration(h: Tensor, v: Tensor) -> Tensor:
    """Row i: the weights with which client i takes the heads of all; variance against distance."""
    apart = [own - h.flatten(1) for own in h.flatten(1)]
    return torch.stack([least_on_simplex(torch.diag(v) + d @ d.T) for d in apart])
