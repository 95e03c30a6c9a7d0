"""An oracle for data source "mixed-shifts": it knows in what each client differs, and keeps just that part private.

Which part that is was chosen on validation data of seed 100, which no table uses: all convolutions and not the first
alone where inputs differ, the whole head and not its bias alone where classes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.algorithms._shared.layers import layers_of
from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.data.sources.mixed_shifts import kind_of

PARTS = ("first layers", "head", "rest")
PRIVATE = {"inputs": "first layers", "classes": "head", "labels": "head"}


@dataclass(frozen=True)
class KnownKinds(Algorithm):
    """Rounds of FedAvg in which a part of the model is averaged over the clients that do not differ in it."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "Oracle of kinds"
    keeps: ClassVar[str] = "layers"
    private: ClassVar[str] = "what a client differs in, by its name"

    def server_init(self, model: Model) -> Params:
        return model.params

    def client_init(self, me: ClientContext) -> Tree:
        return {"own": me.model.params, "share": {part: me.n.new_ones(()) for part in PARTS}}

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, w: Params, share: Tree) -> tuple[Tree, Params]:
        state = me.state | {"share": share}
        w = me.sgd(mixed(me.model, w, state), epochs=self.epochs)
        return state | {"own": {k: w[k] for k in state["own"]}}, w

    def round(self, fed: Federation, w: Params) -> Params:
        n = fed.samples(fed.cohort).to(fed.model.dtype)
        private = [{PRIVATE.get(what) for what in kind_of(fed.names[c])} for c in fed.cohort]
        shares = {part: n.new_tensor([float(part not in own) for own in private]) for part in PARTS}
        replies = fed.keep(fed.map(self.local, w, fed.scatter(shares)))
        part_of = parts_of(fed.model)
        weights = {part: fed.scatter(n * share) for part, share in shares.items() if bool(share.any())}
        return {k: fed.mean(replies[k], weights[part_of[k]]) if part_of[k] in weights else w[k] for k in w}

    def personal(self, me: ClientContext, w: Params) -> Params:
        return mixed(me.model, w, me.state)

    def shares(self, me: ClientContext, w: Params) -> Params:
        part_of, share = parts_of(me.model), me.state["share"]
        return {k: v.new_ones(v.shape) * share[part_of[k]] for k, v in w.items()}


def mixed(model: Model, w: Params, state: Tree) -> Params:
    """The common value of what a client shares, its own of the rest."""
    part_of, own, share = parts_of(model), state["own"], state["share"]
    return {k: own[k].lerp(v, share[part_of[k]].to(v.dtype)) for k, v in w.items()}


def parts_of(model: Model) -> dict[str, str]:
    """Which part of the model each tensor belongs to; convolutions, or the first layer, are what meets the inputs."""
    layers = layers_of(model)
    first = {layers[k] for k, v in model.params.items() if v.dim() == 4} or {0}
    return {k: "head" if k in model.head else "first layers" if layers[k] in first else "rest" for k in model.params}
