"""Empirical Bayes: shrink every parameter towards the common one as far as the data of all clients suggests.

v_i ~ N(w, diag(t)), Y_i ~ N(X_i v_i, noise), by EM: Dempster, Laird, Rubin, J. R. Stat. Soc. B 39, 1977; Laird, Ware,
Biometrics 38, 1982. The degree of collaboration of a parameter is Lambda = noise / t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.algorithms._shared.random_coefficients import RandomCoefficients
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge


@dataclass(frozen=True)
class EmpiricalBayes(RandomCoefficients):
    """A linear mixed model, fitted with one exchange per step of EM; nothing but sums reaches the server."""

    cells: int = 10
    """EM steps per round."""

    title: ClassVar[str] = "EmpiricalBayes"
    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "model"
    onboards_fitted: ClassVar[bool] = True
    citation: ClassVar[str] = """@article{laird1982random,
  title={Random-Effects Models for Longitudinal Data},
  author={Laird, Nan M. and Ware, James H.},
  journal={Biometrics}, volume={38}, number={4}, year={1982}
}"""

    def check(self, model: Model, task: str) -> None:
        ridge.check(model, task)

    def server_init(self, model: Model) -> Tree:
        return self.first_spread(model)

    def client_init(self, me: ClientContext) -> Tree:
        return {"d": ridge.statistics(me.model, me.train)}

    def round(self, fed: Federation, server: Tree) -> Tree:
        steps = []
        for _ in range(self.cells):
            before, server = server["w"], self.em_step(fed, server)
            steps.append((server["w"] - before).norm())
        fed.report(noise=server["noise"], step_of_w=steps)
        return server

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, ridge.shrunk(me.state["d"], self.roots(server), server["w"]))

    def effective_degrees(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, self.roots(server) ** -2)

    def shares(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, ridge.share(me.state["d"], self.roots(server)))
