"""Linear models whose coefficients are drawn around common ones: estimated by EM, with nothing but sums sent.

v_i ~ N(w, diag(t)), Y_i ~ N(X_i v_i, noise): Dempster, Laird, Rubin, J. R. Stat. Soc. B 39, 1977; Laird, Ware,
Biometrics 38, 1982. A client's state has its statistics (ridge.py) under "d".
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.core.algorithm import NUMBER, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge


def _coefficients(algorithm: Algorithm, model: Model) -> Tensor:
    """Of a model that is not linear there are none, and nothing is asked for."""
    return ridge.as_vector(model, model.params) if ridge.is_linear(model) else model.like.new_zeros((0, 0))


def _square(algorithm: Algorithm, model: Model) -> Tensor:
    w = _coefficients(algorithm, model)
    return w.new_zeros((len(w), len(w)))


VECTOR = ReplySpec("vectors of the model's size", _coefficients)
NORMAL = ReplySpec("normal equations", _square)


@dataclass(frozen=True)
class RandomCoefficients(Algorithm, ABC):
    """Steps of EM on (w, t, noise); the degree of collaboration of a parameter is Lambda = noise / t."""

    @staticmethod
    def first_spread(model: Model) -> Params:
        """w, t and noise before anything is known."""
        w = ridge.as_vector(model, model.params)
        return {"w": w, "t": torch.zeros_like(w), "noise": w.new_zeros(())}

    def em_step(self, fed: Federation, spread: Params) -> Params:
        """After one exchange with the clients."""
        w, t, noise = spread["w"], spread["t"], spread["noise"]
        replies = fed.map(self.posterior, w, t, noise) if noise > 0 else fed.map(self.least_squares, w)
        moved, squares, freed, rest, count = replies
        rest, count = fed.sum(rest), fed.sum(count)
        if count == 0:
            # nobody has more samples than parameters: alone they leave no error to learn from, but all together do
            total = dict(zip(("A", "b", "yy", "n"), fed.sum(fed.map(self.in_common)), strict=True))
            w = torch.linalg.pinv(total["A"], hermitian=True, rtol=1e-12) @ total["b"]
            noise = (ridge.squared_error(total, w) / total["n"]).clamp(min=torch.finfo(w.dtype).tiny)
            return {"w": w, "t": noise.expand_as(t), "noise": noise}
        shift = fed.mean(moved)
        spreads = (fed.mean(squares) - shift.square()).clamp(min=0)
        # MacKay's form of the M-step: a parameter that is common loses its variance geometrically
        freedom = fed.mean(freed)
        t = torch.where(freedom > 1e-12, spreads / freedom.clamp(min=1e-12), torch.zeros_like(spreads))
        return {"w": w + shift, "t": t, "noise": (rest / count).clamp(min=torch.finfo(w.dtype).tiny)}

    @on_client(sends=(VECTOR, VECTOR, VECTOR, NUMBER, NUMBER))
    def least_squares(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
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
    def roots(spread: Params) -> Tensor:
        """Lambda^(-1/2) of each parameter: 0 is common to all."""
        return (spread["t"] / spread["noise"].clamp(min=torch.finfo(spread["t"].dtype).tiny)).sqrt()
