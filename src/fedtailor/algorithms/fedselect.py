"""FedSelect: the entries that change most become private. Tamirisa et al., CVPR 2024, Algorithms 1 to 3.

Symbols: m mask of a client, True where an entry is its own; u shared entries, v own ones; w the common model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedtailor.core.algorithm import COUNT, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Ragged, Tree, flat, unflat, wide
from fedtailor.numerics import masks
from fedtailor.numerics.masks import pack, pack_each, unpack

ENTRIES = ReplySpec("shared entries", lambda algorithm, model: pack(v := flat(model.trainable), v.bool()))
MASK = ReplySpec(
    "mask",
    lambda algorithm, model: Ragged(
        (masks.to_bits(v := flat(model.trainable).bool()), v.new_zeros((), dtype=torch.int64))
    ),
)
REST = ReplySpec(
    "statistics", lambda algorithm, model: {k: v for k, v in model.params.items() if k not in model.trainable}
)


@dataclass(frozen=True)
class FedSelect(Algorithm):
    """Own and shared entries are trained in turn; an entry is averaged over the clients that share it."""

    epochs: int = 1
    """Local epochs per round, each a pass over the data for personal entries and one for shared ones."""
    rate: float = 0.25
    """Fraction of the shared entries that become personal when a mask grows (p)."""
    alpha: float = 0.3
    """Maximum fraction of personal entries; 0 is FedAvg."""
    interval: int = 1
    """Rounds between mask growths."""
    choice: Literal["most", "least", "random"] = "most"
    """Which entries become personal: those that changed most, least, or random ones."""
    ranking: Literal["model", "tensor"] = "model"
    """Scope in which entries are ranked, and rate and limit apply."""
    normalise: bool = False
    """Whether changes are ranked in units of the mean change of their tensor."""
    since: Literal["round", "growth"] = "round"
    """Measure changes since the start of the round, or since the last mask growth."""
    biases: bool = True
    """Whether parameters other than weights may become personal."""
    overshoot: bool = False
    """Whether the last growth may exceed the limit."""
    layers: tuple[str, ...] = ()
    """Parts of the model that are personal from the start; masks then do not grow."""
    personal_lr: float | None = None
    """Learning rate of personal entries; local.lr by default."""
    mean: Literal["samples", "clients"] = "samples"
    """Weight clients by their samples, or equally."""
    serve: Literal["common", "own"] = "common"
    """Predict with common entries as of the last average, or as they were before it in the client's own model."""

    title: ClassVar[str] = "FedSelect"
    learns: ClassVar[str] = "masks"
    keeps: ClassVar[str] = "entries"
    private: ClassVar[str] = "entries that its mask selects"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "alpha = 0": ({"alpha": 0.0}, "fedavg", {}, "dense full-batch"),
        "head": ({"layers": ("out",)}, "fedrep", {"head_epochs": 1, "body_epochs": 1}),
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"epochs": 3, "mean": "clients"},
        "released": {"epochs": 3, "mean": "clients", "alpha": 0.8, "interval": 3, "ranking": "tensor"}
        | {"since": "growth", "biases": False, "overshoot": True, "serve": "own"},
    }
    citation: ClassVar[str] = """@inproceedings{tamirisa2024fedselect,
  title={{FedSelect}: Personalized Federated Learning with Customized Selection of Parameters for Fine-Tuning},
  author={Tamirisa, Rishub and Xie, Chulin and Bao, Wenxuan and Zhou, Andy and Arel, Ron and Shamsian, Aviv},
  booktitle={CVPR}, year={2024}}"""

    def check(self, model: Model, task: str) -> None:
        masks.check(self.rate, self.alpha, self.interval)
        masks.under(model.trainable, self.layers)  # or it says which part the model does not have

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params, "masks": {}}  # by name of a client the mask that it told last

    def client_init(self, me: ClientContext) -> Tree:
        v = me.model.trainable
        before = v if self.since == "growth" else {}
        return {"v": v, "m": masks.under(v, ()), "next": masks.under(v, self.layers), "before": before}

    @on_client(sends=(ENTRIES, MASK, REST, COUNT))
    def local(self, me: ClientContext, message: Ragged, statistics: Params) -> tuple[Tree, Tree]:
        v, old, m, before = (me.state[k] for k in ("v", "m", "next", "before"))
        # what has just become own begins at the common value
        start = {k: torch.where(old[k], v[k], u) for k, u in unflat(unpack(message, ~flat(old)), v).items()}
        theta = start | statistics
        for _ in range(self.epochs):  # Algorithm 2
            theta = me.sgd(theta, mask=m, lr=self.personal_lr)
            theta = me.sgd(theta, mask={k: ~own for k, own in m.items()})
        v, wider = {k: theta[k] for k in v}, m
        if not self.layers and me.round % self.interval == 0:  # Algorithm 3
            may = {k for k in v if self.biases or "weight" in k}
            score = masks.scores(v, before or start, m, self.choice, self.normalise, me.uniform)
            wider = masks.grown(m, score, may, self.rate, self.alpha, self.ranking == "tensor", self.overshoot)
            before = v if before else {}
            del score
        del start  # as large as the model
        n = me.n if self.mean == "samples" else torch.ones_like(me.n)
        reply = pack(flat(v), ~flat(m)), masks.news_of(m, old), {k: theta[k] for k in statistics}, n
        return {"v": v, "m": m, "next": wider, "before": before}, reply

    def round(self, fed: Federation, server: Tree) -> Tree:
        model, names = fed.model, fed.names
        w = flat({k: server["w"][k] for k in model.trainable})
        statistics = {k: v for k, v in server["w"].items() if k not in model.trainable}  # averaged, but never masked
        asked = fed.cohort
        known = masks.known(server["masks"], [names[c] for c in asked], w)
        shared = ~masks.from_bits(known, len(w))
        message = fed.scatter(pack_each(w, shared))
        u, news, rest, n = fed.map(self.local, message, statistics)
        known = known[[asked.index(c) for c in news.clients]]
        bits, n_each = masks.heard(fed.gather(news, "mask of each client"), known), fed.gather(n, "sample counts")
        shared = ~masks.from_bits(bits, len(w))
        w = masks.mean_over_sharers(packed := fed.gather(u, "shared entries of each client"), shared, n_each, w)
        fed.report(own=1 - wide(packed[1]).mean() / len(w))
        now = {names[c]: row for c, row in zip(news.clients, bits, strict=True)}
        return {"w": unflat(w, model.trainable) | fed.mean(rest, n), "masks": server["masks"] | now}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        return self.client_init(me) | {"v": {k: server["w"][k] for k in me.model.trainable}}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        if self.serve == "own":
            return server["w"] | me.state["v"]
        return server["w"] | {k: torch.where(m, me.state["v"][k], server["w"][k]) for k, m in me.state["m"].items()}

    def shares(self, me: ClientContext, server: Tree) -> Params:
        return {k: (~m).to(me.n.dtype) for k, m in me.state["m"].items()}
