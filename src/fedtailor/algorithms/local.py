"""Local: every client alone. The baseline that a federation has to beat for each of its members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.core.algorithm import Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class Local(Algorithm):
    """Every client trains its own model on its own data; nothing is sent."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "Local"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "the whole model"

    def client_init(self, me: ClientContext) -> Params:
        return me.model.params

    @on_client()
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.sgd(me.state, epochs=self.epochs), None

    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.map(self.local)
        return server

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.state
