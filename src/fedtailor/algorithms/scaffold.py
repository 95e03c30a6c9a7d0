"""SCAFFOLD: local steps corrected for client drift. Karimireddy et al., ICML 2020, Algorithm 1, option II.

Symbols: x common model; y_i trained by client i in K steps of size eta_l; c, c_i control variates: what the server, and
client i, take for its gradient; S clients of a round, of N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedtailor.algorithms._shared.own_loss import tilted_sgd
from fedtailor.core.algorithm import MODEL, Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import LocalSolver
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError

CHANGE = ReplySpec("change of control variate", lambda algorithm, model: model.trainable)


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """FedAvg of equal clients whose steps go along g_i(y) - c_i + c; a client alone is Local."""

    epochs: int = 1
    """Local epochs per round."""
    server_lr: float = 1.0
    """Learning rate of the server (eta_g)."""

    title: ClassVar[str] = "SCAFFOLD"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "nothing"
    counts_all: ClassVar[bool] = True
    private: ClassVar[str] = "a control variate"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "alone": ({}, "local", {}, "one-client"),
    }
    citation: ClassVar[str] = """@inproceedings{karimireddy2020scaffold,
  title={{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author={Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and Stich, Sebastian and
    Suresh, Ananda Theertha},
  booktitle={ICML}, year={2020}
}"""

    def check_solver(self, solver: LocalSolver) -> None:
        if solver.optimizer != "sgd" or solver.momentum or solver.clip or solver.parts or not solver.is_even:
            raise ConfigError("local: SCAFFOLD reads a mean gradient off a move: it needs sgd, no momentum and no clip")

    def server_init(self, model: Model) -> Tree:
        return {"x": model.params, "c": tree_map(torch.zeros_like, model.trainable)}

    def client_init(self, me: ClientContext) -> Params:
        return {k: torch.zeros_like(v) for k, v in me.model.trainable.items()}

    @on_client(sends=(MODEL.summed(), CHANGE.summed()))
    def local(self, me: ClientContext, x: Params, c: Params) -> tuple[Tree, Tree]:
        c_i, step = me.state, me.steps(self.epochs).clamp(min=1) * me.lr
        y = tilted_sgd(me, x, {k: c[k] - c_i[k] for k in c}, self.epochs)  # line 10
        new = {k: c_i[k] - c[k] + (x[k] - y[k]) / step for k in c}  # line 12, K eta_l = step
        return new, (y, {k: new[k] - c_i[k] for k in c})

    def round(self, fed: Federation, server: Tree) -> Tree:
        x, c = server["x"], server["c"]
        y, change = fed.map(self.local, x, c)
        mean, change = fed.mean(y), fed.sum(change)
        x = mean | {k: x[k] + self.server_lr * (mean[k] - x[k]) for k in c}  # line 17; statistics are averaged
        return {"x": x, "c": {k: v + change[k] / fed.clients for k, v in c.items()}}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["x"]
