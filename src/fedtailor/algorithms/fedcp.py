"""FedCP: a policy splits each sample's features between two heads. Zhang et al., KDD 2023, Algorithm 1.

Symbols: h features; r in [0, 1] their share for the own head, 1 - r for the common one, from the policy network (CPN)
with input h v; v the sum of the rows of the own head, of length 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize

from fedtailor.algorithms._shared.heads import check_dense_head, dense, weight_of_head
from fedtailor.algorithms._shared.own_loss import beside, some_samples, without_prefix
from fedtailor.core.algorithm import COUNT, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics.discrepancy import discrepancy

SHARED = ReplySpec("body, head and policy", lambda algorithm, model: algorithm.server_init(model))
COMMON, POLICY, V, SOME, BEFORE, COUNTED = (f"fedcp.{k}" for k in ("head", "policy", "v", "some", "before", "counted"))
WIDTHS = (10.0, 15.0, 20.0, 50.0)  # of the authors' kernels


@dataclass(frozen=True)
class FedCP(Algorithm):
    """Body, policy and own head are trained under a common head; features are held near those of the body received."""

    epochs: int = 1
    """Local epochs per round."""
    lam: float = 5.0
    """Weight of the maximum mean discrepancy between the features and those of the received body."""
    samples: int = 32
    """Samples per client, drawn in each round, whose features are compared."""

    title: ClassVar[str] = "FedCP"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "head"
    private: ClassVar[str] = "head"
    needs_tensor: ClassVar[bool] = True
    citation: ClassVar[str] = """@inproceedings{zhang2023fedcp,
  title={{FedCP}: Separating Feature Information for Personalized Federated Learning via Conditional Policy},
  author={Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and Guan, Haibing},
  booktitle={KDD}, year={2023}
}"""

    def check(self, model: Model, task: str) -> None:
        check_dense_head(model, self.title)

    def server_init(self, model: Model) -> Tree:
        like, (_, k) = weight_of_head(model), weight_of_head(model).shape
        drawn = torch.from_numpy(stream("fedcp", "policy").uniform(-(k**-0.5), k**-0.5, (k + 1, 2 * k))).to(like)
        policy = {"weight": drawn[:k].T, "bias": drawn[k], "scale": torch.ones_like(drawn[k])}
        return {"body": model.body, "head": model.head, "policy": policy | {"shift": torch.zeros_like(drawn[k])}}

    def client_init(self, me: ClientContext) -> Params:
        return me.model.head

    def onboard_init(self, me: ClientContext, server: Tree) -> Params:
        return dict(server["head"])

    @on_client(sends=(SHARED.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, common: Tree) -> tuple[Tree, Tree]:
        some, _, counted = some_samples(me, self.samples)
        before, _ = me.model.features_and_outputs(me.buffers | common["body"] | me.state, some)
        frozen = beside(COMMON, common["head"]) | {V: direction(me.state), SOME: some, BEFORE: before, COUNTED: counted}

        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            output = gated_outputs(me.model, t, t[V], x, training=True)
            h, _ = me.model.features_and_outputs(t, t[SOME])
            return me.experiment.loss(output, y) + self.lam * discrepancy(h, t[BEFORE], t[COUNTED], WIDTHS)

        start = common["body"] | me.state | beside(POLICY, common["policy"])
        trained = me.sgd(start, epochs=self.epochs, frozen=frozen, loss=loss)
        own = {k: trained[k] for k in me.state}
        mixed = {k: (v + own[k]) / 2 for k, v in common["head"].items()}
        body = {k: trained[k] for k in common["body"]}
        return own, ({"body": body, "head": mixed, "policy": without_prefix(POLICY, trained)}, me.n)

    def round(self, fed: Federation, common: Tree) -> Tree:
        return fed.mean(*fed.map(self.local, common))

    def personal(self, me: ClientContext, common: Tree) -> Params:
        return common["body"] | me.state | beside(COMMON, common["head"]) | beside(POLICY, common["policy"])

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        return gated_outputs(model, personal, direction({k: personal[k] for k in model.head}), x)

    def onboard(self, me: ClientContext, common: Tree, epochs: int) -> Params:
        rest = {k: v for k, v in self.personal(me, common).items() if k not in me.state}

        def loss(t: Params, x: Tensor, y: Tensor) -> Tensor:
            return me.experiment.loss(gated_outputs(me.model, t, t[V], x, training=True), y)

        return rest | me.sgd(me.state, epochs=epochs, frozen=rest | {V: direction(me.state)}, loss=loss)


def direction(head: Params) -> Tensor:
    return normalize(next(w for w in head.values() if w.dim() == 2).sum(0), dim=0)


def gated_outputs(model: Model, t: Params, v: Tensor, x: Tensor, *, training: bool = False) -> Tensor:
    """The own head's outputs for r h and the common head's for (1 - r) h, added."""

    def r(h: Tensor) -> Tensor:
        p = without_prefix(POLICY, t)
        a = layer_norm((h * v) @ p["weight"].T + p["bias"], p["scale"].shape, p["scale"], p["shift"]).relu()
        return (a[:, : h.shape[1]] - a[:, h.shape[1] :]).sigmoid()  # the softmax of two

    h, own = model.features_and_outputs(t, x, training=training, change=lambda h: r(h) * h)
    return own + dense(without_prefix(COMMON, t), (1 - r(h)) * h)
