"""GPFL: global and personal features from one body, by class embeddings. Zhang et al., ICCV 2023, Algorithm 1.

Symbols: f features; E common embeddings of the classes (GCE); CoV a common network that shifts and scales f by a
vector: by g, the mean of E, for what is common, and by p, the mean of E by the client's labels, for its own head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm, normalize

from fedtailor.algorithms._shared.heads import weight_of_head
from fedtailor.algorithms._shared.prototypes import check_classes
from fedtailor.core.algorithm import COUNT, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree

SHARED = ReplySpec("body, embeddings and network", lambda algorithm, model: algorithm.server_init(model), is_model=True)
E, BEFORE, P, G = "gpfl.embeddings", "gpfl.embeddings_received", "gpfl.p", "gpfl.g"
GAMMA, BETA = "gpfl.gamma", "gpfl.beta"


@dataclass(frozen=True)
class GPFL(Algorithm):
    """Body, embeddings and CoV are averaged; heads are private and see features shifted towards the client's labels."""

    epochs: int = 1
    """Local epochs per round."""
    lam: float = 1.0
    """Weight of the distance between common features and the received embedding of their class."""
    mu: float = 0.0
    """Weight decay of embeddings and CoV."""

    title: ClassVar[str] = "GPFL"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "head"
    private: ClassVar[str] = "head, its label frequencies"
    citation: ClassVar[str] = """@inproceedings{zhang2023gpfl,
  title={{GPFL}: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated
    Learning},
  author={Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and Cao, Jian and
    Guan, Haibing},
  booktitle={ICCV}, year={2023}
}"""

    def check(self, model: Model, task: str) -> None:
        check_classes(model, task, self.title)

    def server_init(self, model: Model) -> Params:
        like, (classes, k) = weight_of_head(model), weight_of_head(model).shape
        rng, bound = stream("gpfl", "embeddings"), k**-0.5
        made = {E: rng.standard_normal((classes, k))}
        for part in (GAMMA, BETA):
            made |= {
                f"{part}.weight": rng.uniform(-bound, bound, (k, k)),
                f"{part}.bias": rng.uniform(-bound, bound, k),
            }
        new = {name: torch.from_numpy(v).to(like) for name, v in made.items()}
        for part in (GAMMA, BETA):
            new |= {f"{part}.scale": torch.ones_like(like[0]), f"{part}.shift": torch.zeros_like(like[0])}
        return model.body | new

    def client_init(self, me: ClientContext) -> Params:
        return me.model.head

    def conditions(self, me: ClientContext, common: Params) -> Params:
        """g and p."""
        _, y, mask = me.train
        counts = ((y[:, None] == torch.arange(len(common[E]), device=y.device)) * mask[:, None]).sum(0)
        return {G: common[E].mean(0), P: (counts / me.n.clamp(min=1)) @ common[E]}

    def train(self, me: ClientContext, start: Params, frozen: Params, epochs: int) -> Params:
        def loss(t: Params, x: Tree, y: Tensor) -> Tensor:
            f, output = me.model.features_and_outputs(t, x, training=True, change=lambda f: cov(t, f, t[P]))
            of_all = cov(t, f, t[G])
            cosines = normalize(of_all) @ normalize(t[E]).T  # (6)
            away = (of_all - t[BEFORE][y]).square().sum(1).clamp(min=1e-24).sqrt()  # (8)
            decay = sum((t[k] ** 2).sum() for k in t if k == E or k.startswith((GAMMA, BETA)))
            guided = cross_entropy(cosines, y, reduction="none") + self.lam * away + self.mu / 2 * decay
            return me.experiment.loss(output, y) + guided

        return me.sgd(start, epochs=epochs, frozen=frozen, loss=loss)

    @on_client(sends=(SHARED.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, common: Params) -> tuple[Tree, Tree]:
        frozen = self.conditions(me, common) | {BEFORE: common[E]}
        trained = self.train(me, common | me.state, frozen, self.epochs)
        return {k: trained[k] for k in me.state}, ({k: trained[k] for k in common}, me.n)

    def round(self, fed: Federation, common: Params) -> Params:
        return fed.mean(*fed.map(self.local, common))

    def personal(self, me: ClientContext, common: Params) -> Params:
        return common | me.state | {P: self.conditions(me, common)[P]}

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        return model.features_and_outputs(personal, x, change=lambda f: cov(personal, f, personal[P]))[1]

    def onboard(self, me: ClientContext, common: Params, epochs: int) -> Params:
        given = self.conditions(me, common)
        head = self.train(me, me.state, common | given | {BEFORE: common[E]}, epochs)
        return common | head | {P: given[P]}


def cov(t: Params, f: Tensor, by: Tensor) -> Tensor:
    """The features under a condition, (3)."""

    def part(name: str) -> Tensor:
        out = (t[f"{name}.weight"] @ by + t[f"{name}.bias"]).relu()
        return layer_norm(out, out.shape, t[f"{name}.scale"], t[f"{name}.shift"])

    return (f * (part(GAMMA) + 1) + part(BETA)).relu()
