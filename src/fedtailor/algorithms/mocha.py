"""MOCHA: linear models tied by learned task relations. Smith et al., NeurIPS 2017, Algorithm 1.

Symbols: W the clients' models as columns; Sigma = Omega^-1 how tasks are related; the objective is the sum of f_t(w_t)
plus lam/2 tr(W Omega W'); B the dual variables, summed over a client's samples, with W = B Sigma / lam; rho makes the
local subproblems so careful that they can be solved side by side. f_t is half the mean squared error: they have a
closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.random_coefficients import VECTOR
from fedtailor.core.algorithm import Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import ridge


@dataclass(frozen=True)
class MOCHA(Algorithm):
    """Clients solve their part of the dual problem; the server combines the solutions and learns the relations."""

    cells: int = 10
    """Exchanges per round, with the same task relations."""
    lam: float = 0.01
    """Weight of the regularization."""
    floor: float = 0.1
    """Share of independence in the learned relations; 0 is the paper's, 1 is ridge regression of each client alone."""

    title: ClassVar[str] = "MOCHA"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "model"
    by_client: ClassVar[tuple[str, ...]] = ("B", "W", "is_known")
    citation: ClassVar[str] = """@inproceedings{smith2017federated,
  title={Federated Multi-Task Learning},
  author={Smith, Virginia and Chiang, Chao-Kai and Sanjabi, Maziar and Talwalkar, Ameet},
  booktitle={NeurIPS}, year={2017}
}"""

    def check(self, model: Model, task: str) -> None:
        ridge.check(model, task)
        if self.lam <= 0 or not 0 <= self.floor <= 1 or self.cells < 1:
            raise ConfigError("algorithm: MOCHA needs lam above 0, floor between 0 and 1, cells of at least 1")

    def client_init(self, me: ClientContext) -> Tree:
        zero = torch.zeros_like(ridge.as_vector(me.model, me.model.params))
        return {"d": ridge.statistics(me.model, me.train), "w": zero, "b": zero}

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        return self.client_init(me) | {"w": server["W"].sum(-1) / server["is_known"].sum()}

    @on_client(sends=VECTOR)
    def solve(self, me: ClientContext, w: Tensor, kappa: Tensor) -> tuple[Tree, Tree]:
        """min f(u) + <b, u> + kappa/2 |u - w|^2, the local subproblem; what it adds to b is kappa (u - w)."""
        u = ridge.ridge(me.state["d"], me.n * kappa, w - me.state["b"] / kappa)
        return me.state | {"w": w, "b": me.state["b"] + kappa * (u - w)}, kappa * (u - w)

    @on_client()
    def adopt(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
        return me.state | {"w": w}, None

    def round(self, fed: Federation, server: Tree) -> Tree:
        none = ridge.as_vector(fed.model, fed.model.params)[..., None].expand(*(-1, -1, fed.clients)).mul(0)
        B, W, is_known = (server.get(k, v) for k, v in (("B", none), ("W", none), ("is_known", none[0, 0])))
        is_known = is_known.index_fill(0, fed.places(fed.cohort), 1)
        Sigma = self.task_covariance(W, is_known)
        rho = (Sigma.abs().sum(1) / Sigma.diagonal().clamp(min=1e-30)).max()
        W = B @ Sigma / self.lam
        for _ in range(self.cells):
            at = fed.places(fed.cohort)
            kappa = self.lam / (rho * Sigma.diagonal()[at])
            deltas = fed.map(self.solve, fed.scatter(W[..., at].movedim(-1, 0)), fed.scatter(kappa))
            moved = fed.gather(deltas, "dual variables of each client").movedim(0, -1)
            B = B.index_add(-1, fed.places(deltas.clients), moved)
            W = B @ Sigma / self.lam
        fed.map(self.adopt, fed.scatter(W[..., fed.places(fed.cohort)].movedim(-1, 0)))
        return {"B": B, "W": W, "is_known": is_known}

    def task_covariance(self, W: Tensor, is_known: Tensor) -> Tensor:
        """Sigma = (W'W)^(1/2) / tr (W'W)^(1/2), with a floor; 0 for clients that never took part."""
        _, s, v = torch.linalg.svd(W.flatten(0, 1), full_matrices=False)
        alone = torch.diag(is_known) / is_known.sum()
        return torch.lerp((v.T * s) @ v / s.sum(), alone, self.floor) if s.sum() > 0 else alone

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return ridge.as_params(me.model, me.state["w"])
