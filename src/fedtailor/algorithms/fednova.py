"""FedNova: updates normalized by the number of local steps. Wang et al., 2020.

Symbols: tau local steps; a = |a|_1 of the paper's (5)-(11), what the gradients of one client weigh together: tau for
plain SGD, more with momentum; d = (w - w_k) / a normalised move; p = n / N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.experiment import LocalSolver
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

BY_STEPS = replace(COUNT, name="samples by weight of steps")
TIMES_STEPS = replace(COUNT, name="samples times weight of steps")


@dataclass(frozen=True)
class FedNova(Algorithm):
    """FedAvg with normalised moves; with equal numbers of steps it is FedAvg."""

    epochs: int = 1
    """Local epochs per round."""
    mu: float = 0.0
    """Weight of a proximal term in the local loss, as in FedProx."""

    title: ClassVar[str] = "FedNova"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "nothing"
    stale: ClassVar[bool] = True
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "equal steps": ({}, "fedavg", {}, "full-batch"),
    }
    citation: ClassVar[str] = """@inproceedings{wang2020tackling,
  title={Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
  author={Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
  booktitle={NeurIPS}, year={2020}
}"""

    def check_solver(self, solver: LocalSolver) -> None:
        if solver.optimizer != "sgd" or solver.parts or not solver.is_even or (self.mu and solver.momentum):
            raise ConfigError("local: FedNova knows how equal steps of sgd add up, with momentum or with mu")

    server_init = FedAvg.server_init

    @on_client(sends=(MODEL.weighted_by(BY_STEPS), BY_STEPS, TIMES_STEPS.summed()))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        a = self.weight_of_steps(me)
        return {}, (me.sgd(w, epochs=self.epochs, prox=(w, self.mu) if self.mu else None), me.n / a, me.n * a)

    def weight_of_steps(self, me: ClientContext) -> Tensor:
        return weight_of_steps(me.steps(self.epochs), me.solver.momentum, me.lr * self.mu)

    def round(self, fed: Federation, w: Params) -> Params:
        models, by_weight, times_weight = fed.map(self.local, w)
        n = fed.samples(fed.asked if fed.environment.missing == "stale" else fed.cohort).sum()
        tau_eff, scale = fed.sum(times_weight) / n, fed.sum(by_weight) / n
        mean, trained = fed.mean(models, by_weight), fed.model.trainable
        # statistics are averaged: beyond the mean a variance may be negative
        return {k: v + (tau_eff * scale).to(v.dtype) * (mean[k] - v) if k in trained else mean[k] for k, v in w.items()}

    personal = FedAvg.personal


def weight_of_steps(tau: Tensor, momentum: float, shrinkage: float) -> Tensor:
    """|a|_1 of tau steps with momentum, or with a proximal term, by which a step shrinks what came before it."""
    if shrinkage:
        keep = 1 - shrinkage
        return (1 - keep**tau) / shrinkage
    return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
