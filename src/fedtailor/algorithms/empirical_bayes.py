"""Empirical Bayes: shrink every parameter towards the common one as far as the data of all clients suggests.

v_i ~ N(w, diag(t)), Y_i ~ N(X_i v_i, noise), by EM: Dempster, Laird, Rubin, J. R. Stat. Soc. B 39, 1977; Laird, Ware,
Biometrics 38, 1982. The degree of collaboration of a parameter is Lambda = noise / t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms.joint_ls import NORMAL
from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge

VECTOR = ReplySpec("vectors of the model's size", lambda algorithm, model: ridge.as_vector(model, model.params))


@dataclass(frozen=True)
class EmpiricalBayes(Algorithm):
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
        w = ridge.as_vector(model, model.params)
        return {"w": w, "t": torch.zeros_like(w), "noise": w.new_zeros(())}

    def client_init(self, me: ClientContext) -> Tree:
        return {"d": ridge.statistics(me.model, me.train)}

    def round(self, fed: Federation, server: Tree) -> Tree:
        w, t, noise = server["w"], server["t"], server["noise"]
        steps = []
        for _ in range(self.cells):
            replies = fed.map(self.posterior, w, t, noise) if noise > 0 else fed.map(self.alone, w)
            moved, squares, freed, rest, count = replies
            rest, count = fed.sum(rest), fed.sum(count)
            if count == 0:
                # nobody has more samples than parameters: alone they leave no error to learn from, but all together do
                total = dict(zip(("A", "b", "yy", "n"), fed.sum(fed.map(self.in_common)), strict=True))
                w = torch.linalg.pinv(total["A"], hermitian=True, rtol=1e-12) @ total["b"]
                noise = (ridge.squared_error(total, w) / total["n"]).clamp(min=torch.finfo(w.dtype).tiny)
                t = noise.expand_as(t)
                continue
            shift = fed.mean(moved)
            spread = (fed.mean(squares) - shift.square()).clamp(min=0)
            # MacKay's form of the M-step: a parameter that is common loses its variance geometrically
            freedom = fed.mean(freed)
            w, t = w + shift, torch.where(freedom > 1e-12, spread / freedom.clamp(min=1e-12), torch.zeros_like(spread))
            steps.append(shift.norm())
            noise = (rest / count).clamp(min=torch.finfo(w.dtype).tiny)
        fed.report(noise=noise, step_of_w=steps)
        return {"w": w, "t": t, "noise": noise}

    @on_client(sends=(VECTOR, VECTOR, VECTOR, NUMBER, NUMBER))
    def alone(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
        d = me.state["d"]
        v = ridge.least_squares(d)
        freedom = torch.ones_like(v)
        return me.state, (v - w, (v - w).square(), freedom, ridge.squared_error(d, v), ridge.residual_freedom(d))

    @on_client(sends=(NORMAL, VECTOR, NUMBER, NUMBER))
    def in_common(self, me: ClientContext) -> tuple[Tree, Tree]:
        d = me.state["d"]
        return me.state, (d["A"], d["b"], d["yy"], d["n"] * d["b"].shape[-1])

    @on_client(sends=(VECTOR, VECTOR, VECTOR, NUMBER, NUMBER))
    def posterior(self, me: ClientContext, w: Tensor, t: Tensor, noise: Tensor) -> tuple[Tree, Tree]:
        d, r = me.state["d"], (t / noise).sqrt()
        c, v = ridge.covariance(d, r), ridge.shrunk(d, r, w)
        freedom = ridge.determined(d, r)
        rest = ridge.squared_error(d, v) + noise * (c * d["A"][None]).sum()
        return me.state, (v - w, (v - w).square(), freedom, rest, d["n"] * w.shape[-1])

    @staticmethod
    def roots(server: Tree) -> Tensor:
        """Lambda^(-1/2) of each parameter: 0 is common to all."""
        return (server["t"] / server["noise"].clamp(min=torch.finfo(server["t"].dtype).tiny)).sqrt()

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, ridge.shrunk(me.state["d"], self.roots(server), server["w"]))

    def effective_degrees(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, self.roots(server) ** -2)

    def shares(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, ridge.share(me.state["d"], self.roots(server)))
