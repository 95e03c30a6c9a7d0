"""FedALT: private adapters next to the mean of the others', with a learned mixer. Bian et al., AAAI 2026, Algorithm 1.

Symbols: v a client's adapters, which are never replaced; r the mean of the others' (rest of the world); G mixer of a
layer, two weights softmax(G x) for its input x; what a layer adds is the first times v's part and the second times r's.
The server sends the sum of all adapters, from which a client takes its own: r is known to nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedtailor.algorithms._shared.lora_parts import Adapter, adapters, check_dense_adapters, mixed_outputs, names
from fedtailor.algorithms._shared.own_loss import beside, without_prefix
from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map

R, G = "fedalt.r", "fedalt.mixer"
ADAPTERS = ReplySpec("adapters", lambda algorithm, model: {k: model.trainable[k] for k in names(model)})


@dataclass(frozen=True)
class FedALT(Algorithm):
    """v and G are trained together, r stays; v goes on from where it was."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "FedALT"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "mixer; own adapters are sent, but never replaced"
    citation: ClassVar[str] = """@inproceedings{bian2026fedalt,
  title={{FedALT}: Federated Fine-Tuning Through Adaptive Local Training with Rest-of-World {LoRA}},
  author={Bian, Jieming and Wang, Lei and Zhang, Letian and Xu, Jie},
  booktitle={AAAI}, year={2026}
}"""

    def check(self, model: Model, task: str) -> None:
        check_dense_adapters(model, self.title)

    def server_init(self, model: Model) -> Tree:
        zero = model.like.new_zeros(())
        own = {k: model.trainable[k] for k in names(model)}
        return {"sum": tree_map(torch.zeros_like, own), "count": zero, "rounds": zero}

    def client_init(self, me: ClientContext) -> Tree:
        mixer = {k: torch.zeros_like(me.model.trainable[a.a][:2].expand(2, -1)) for k, a in adapters(me.model).items()}
        return {"v": me.model.params, "mixer": mixer, "sent": torch.full_like(me.n, -1)}

    @on_client(sends=ADAPTERS.summed())
    def local(self, me: ClientContext, total: Params, count: Tensor, rounds: Tensor) -> tuple[Tree, Tree]:
        v, mixer = self.train_adapters(me, rest(me.state, total, count, rounds), self.epochs)
        return {"v": v, "mixer": mixer, "sent": rounds + 1}, {k: v[k] for k in total}

    def train_adapters(self, me: ClientContext, r: Params, epochs: int) -> tuple[Params, Params]:
        """v and G after training."""

        def loss(t: Params, x: Tree, y: Tensor) -> Tensor:
            return me.experiment.loss(self.predict(me.model, t, x, training=True), y)

        start = me.state["v"] | beside(G, me.state["mixer"])
        trained = me.sgd(start, epochs=epochs, frozen=beside(R, r), loss=loss)
        return {k: trained[k] for k in me.state["v"]}, without_prefix(G, trained)

    def round(self, fed: Federation, server: Tree) -> Tree:
        sent = fed.map(self.local, server["sum"], server["count"], server["rounds"])
        total = fed.sum(sent)
        count = torch.full_like(server["count"], len(sent.clients))
        return {"sum": total, "count": count, "rounds": server["rounds"] + 1}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        r = rest(me.state, server["sum"], server["count"], server["rounds"])
        return me.state["v"] | beside(G, me.state["mixer"]) | beside(R, r)

    def onboard(self, me: ClientContext, server: Tree, epochs: int) -> Params:
        r = rest(me.state, server["sum"], server["count"], server["rounds"])
        v, mixer = self.train_adapters(me, r, epochs)
        return v | beside(G, mixer) | beside(R, r)

    def predict(self, model: Model, personal: Params, x: Tree, *, training: bool = False) -> Tensor:
        r, mixers = without_prefix(R, personal), without_prefix(G, personal)

        def mix(layer: str, adapter: Adapter, h: Tensor) -> Tensor:
            weights = linear(h, mixers[layer]).softmax(-1)
            return weights[..., :1] * adapter.change(personal, h) + weights[..., 1:] * adapter.change(r, h)

        return mixed_outputs(model, personal, x, mix, training=training)


def rest(state: Tree, total: Params, count: Tensor, rounds: Tensor) -> Params:
    """The mean of the others: the last sum without what this client had in it. Nothing while there are no others."""
    has_sent = (state["sent"] == rounds).to(count.dtype)
    others = (count - has_sent).clamp(min=1)
    is_any = count - has_sent > 0
    return {k: torch.where(is_any, (s - has_sent * state["v"][k]) / others, 0) for k, s in total.items()}
