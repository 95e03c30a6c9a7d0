"""FedAvg whose clients note which unit of the second device their process has used."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from tests.devices import sim


@dataclass(frozen=True)
class Units(Algorithm):
    """-1: none, or both."""

    def server_init(self, model: Model) -> Tree:
        return model.params

    def client_init(self, me: ClientContext) -> Tree:
        return {"unit": torch.zeros_like(me.n)}

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        used = [unit for unit in (0, 1) if "library" in sim.LOADED and sim.allocations(unit)]
        own = used[0] if len(used) == 1 and me.n.device == torch.device("sim", used[0]) else -1
        return {"unit": torch.full_like(me.n, own)}, (me.sgd(w), me.n)

    def round(self, fed: Federation, server: Tree) -> Tree:
        return fed.mean(*fed.map(self.local, server))

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server
