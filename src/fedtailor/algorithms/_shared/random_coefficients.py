"""Linear models whose coefficients are drawn around common ones: estimated by EM, with nothing but sums sent.

v_i ~ N(w, diag(t)), Y_i ~ N(X_i v_i, noise): Dempster, Laird, Rubin, J. R. Stat. Soc. B 39, 1977; Laird, Ware,
Biometrics 38, 1982. The variances t are shrunk towards each other by the method of moments of DerSimonian, Laird,
Control. Clin. Trials 7, 1986. A client's state has its statistics (ridge.py) under "d".
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


def tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def shrunk_variances(q: Tensor, clients: Tensor) -> Tensor:
    """Variances between clients, in units of the variance of a client's own estimate, shrunk by what chance explains.

    From so many clients each is known up to a standard error of (q + 1) sqrt(2 / clients). They are shrunk towards
    their mean unless they differ by more than that; the mean towards 0, which it is below Akaike's threshold.
    """
    mean = q.mean()
    of_mean = 2 / (clients * q.numel()) * (mean + 1).square()
    target = mean * (1 - 2 * of_mean / mean.square().clamp(min=tiny(q))).clamp(min=0)
    chance = 2 / clients * (q + 1).square()
    real = (q.var() - chance.mean()).clamp(min=0) if q.numel() > 1 else torch.zeros_like(mean)
    return torch.lerp(q, target, chance / (real + chance))


@dataclass(frozen=True)
class RandomCoefficients(Algorithm, ABC):
    """Steps of EM on (w, t, noise); the degree of collaboration of a parameter is Lambda = noise / t."""

    hierarchical: bool = True
    """Shrink the variances of linear coefficients to their mean, and that to 0, as far as chance explains them."""

    @staticmethod
    def first_spread(model: Model) -> Params:
        """Before anything is known: w, t and noise; the inverse of the clients' mean A and its diagonal a; counts."""
        w = ridge.as_vector(model, model.params)
        zero = w.new_zeros(())
        spread = {"w": w, "t": torch.zeros_like(w), "noise": zero, "samples": zero, "clients": zero, "rounding": zero}
        return spread | {"inverse": w.new_zeros((len(w), len(w))), "a": torch.zeros_like(w[:, :1])}

    def em_step(self, fed: Federation, spread: Params) -> Params:
        """After one exchange with the clients; two at first."""
        w, t, noise = spread["w"], spread["t"], spread["noise"]
        if noise == 0:
            return self.first_fit(fed)
        left, squares, freed, rest, count = fed.map(self.posterior, w, t, noise)
        left, count = fed.mean(left), fed.sum(count)
        # EM moves w by the mean of v - w, which is t / noise * left: hardly at all where t is small. With the least
        # squares step beside it, it is Newton's step if every client has the mean A, and no longer than that otherwise
        ease = (spread["samples"] * len(fed.cohort) / count).clamp(max=1)
        w = w + ease * (t / noise * left + spread["inverse"] @ left)
        # MacKay's form of the M-step: a parameter that is common loses its variance geometrically
        freedom = fed.mean(freed)
        t = torch.where(freedom > 1e-12, fed.mean(squares) / freedom.clamp(min=1e-12), torch.zeros_like(t))
        return spread | {"w": w, "t": t, "noise": (fed.sum(rest) / count).clamp(min=spread["rounding"])}

    def first_fit(self, fed: Federation) -> Params:
        """Least squares of all samples, and the error that is left by each client's own."""
        total = dict(zip(("A", "b", "yy", "n"), fed.sum(fed.map(self.in_common)), strict=True))
        inverse = torch.linalg.pinv(total["A"], hermitian=True, rtol=1e-12)
        w, clients = inverse @ total["b"], total["n"].new_tensor(len(fed.cohort))
        spread = {"w": w, "inverse": inverse * clients, "a": torch.diagonal(total["A"])[:, None] / clients}
        rounding = (torch.finfo(w.dtype).eps * total["yy"] / total["n"]).clamp(min=tiny(w))  # no less is seen of errors
        spread |= {"samples": total["n"] / clients, "clients": clients, "rounding": rounding}
        rest, count = (fed.sum(reply) for reply in fed.map(self.left_alone))
        if count == 0:  # nobody has more samples than parameters: alone they leave no error, but all together do
            rest, count = ridge.squared_error(total, w), total["n"]
        noise = (rest / count).clamp(min=rounding)
        # clients differ as much as the error of a client's own estimate; not the distance of those, which for one that
        # does not determine its parameters may be anything
        t = torch.where(spread["a"] > 0, noise / spread["a"].clamp(min=tiny(w)), torch.zeros_like(w))
        return spread | {"noise": noise, "t": t}

    @on_client(sends=(NORMAL.summed(), VECTOR.summed(), NUMBER.summed(), NUMBER.summed()))
    def in_common(self, me: ClientContext) -> tuple[Tree, Tree]:
        d = me.state["d"]
        return me.state, (d["A"], d["b"], d["yy"], d["n"] * d["b"].shape[-1])

    @on_client(sends=(NUMBER.summed(), NUMBER.summed()))
    def left_alone(self, me: ClientContext) -> tuple[Tree, Tree]:
        d = me.state["d"]
        return me.state, (ridge.squared_error(d, ridge.least_squares(d)), ridge.residual_freedom(d))

    @on_client(sends=(*3 * (VECTOR.summed(),), NUMBER.summed(), NUMBER.summed()))
    def posterior(self, me: ClientContext, w: Tensor, t: Tensor, noise: Tensor) -> tuple[Tree, Tree]:
        d, r = me.state["d"], (t / noise).sqrt()
        c, v = ridge.covariance(d, r), ridge.shrunk(d, r, w)
        freedom = ridge.determined(d, r)
        rest = ridge.squared_error(d, v) + noise * (c * d["A"][None]).sum()
        return me.state, (d["b"] - d["A"] @ v, (v - w).square(), freedom, rest, d["n"] * w.shape[-1])

    def shrinkage(self, spread: Params) -> Params:
        """What clients are shrunk towards, and how far."""
        return {"w": spread["w"], "r": self.roots(spread)}

    def roots(self, spread: Params) -> Tensor:
        """Lambda^(-1/2) of each parameter: 0 is common to all."""
        a, inverse = spread["a"], spread["t"] / spread["noise"].clamp(min=tiny(spread["t"]))
        if self.hierarchical:
            shrunk = shrunk_variances(inverse * a, spread["clients"].clamp(min=1)) / a.clamp(min=tiny(a))
            inverse = torch.where(a > 0, shrunk, inverse)
        return inverse.sqrt()
