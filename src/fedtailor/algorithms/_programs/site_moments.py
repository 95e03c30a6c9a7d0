"""SiteMoments: every site sends the cross products of its columns once; the server trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.algorithms._shared.random_coefficients import NORMAL, VECTOR
from fedtailor.core.algorithm import COUNT, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge


@dataclass(frozen=True)
class SiteMoments(Algorithm):
    """X'X, X'y, y'y and the rows of every site, by site: what a linear model needs to know."""

    title: ClassVar[str] = "SiteMoments"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "rows"

    def check(self, model: Model, task: str) -> None:
        ridge.names(model)

    def server_init(self, model: Model) -> Tree:
        return {"sites": model.like.new_zeros(())}

    def round(self, fed: Federation, server: Tree) -> Tree:
        a, b, c, n = fed.map(self.moments)
        return {
            "a": fed.gather(a, "cross products of columns"),
            "b": fed.gather(b, "cross products with the target"),
            "c": fed.gather(c, "squares of the target"),
            "n": fed.gather(n, "sample counts"),
        }

    @on_client(sends=(NORMAL, VECTOR, NUMBER, COUNT))
    def moments(self, me: ClientContext) -> tuple[Tree, Tree]:
        d = ridge.moments(me.model, me.train)
        return me.state, (d["A"], d["b"], d["yy"], d["n"])

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.model.params
