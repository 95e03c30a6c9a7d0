"""DUW-FedAvg: learn a weight for each client and round of the average. Nakai-Kasai, Wadayama, 2024, Algorithm 2.

Symbols: theta learned; Theta = theta^2 / sum theta^2 weights of a round; L outer loss; a = dL/dw. Before the first
round, M outer iterations of T rounds from the same start learn theta; then the table drives the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.algorithm import MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.federation import Federation, Placed
from fedtailor.core.me import Me
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError
from fedtailor.local.training import Solver
from fedtailor.local.unfolding import FEATURES, Average, adam, average, learnable, seen, vector


@dataclass(frozen=True)
class DUWFedAvg(Algorithm):
    """FedAvg whose weights are learned by unfolding its rounds in the very environment in which they take place."""

    epochs: int = 1
    """Local epochs per round."""
    horizon: int = 10
    """T: rounds that are unfolded; later ones use the weights of the last."""
    outer_iterations: int = 50
    """M: how often these rounds are run to learn theta, before the first round of the run."""
    outer_lr: float = 0.005
    """Step size of theta (Adam)."""
    outer: Literal["path", "final", "holdout"] = "path"
    """L: training losses along all rounds and at the end (paper), at the end only, or validation loss at the end."""
    gradient: Literal["first-order", "exact"] = "first-order"
    """Local gradients taken as constants, in closed form (paper); or through the local steps, for L at the end."""
    weights: Literal["table", "rule"] = "table"
    """A weight for each client and round (paper), or a rule of what the server sees, which carries over to others."""

    title: ClassVar[str] = "DUW-FedAvg"
    stale: ClassVar[bool] = True
    by_client: ClassVar[tuple[str, ...]] = ("learned", "theta", "answers")
    citation: ClassVar[str] = """@article{nakai2024deep,
  title={Deep Unfolding-Based Weighted Averaging for Federated Learning in Heterogeneous Environments},
  author={Nakai-Kasai, Ayano and Wadayama, Tadashi},
  year={2024}
}"""

    @property
    def preparation(self) -> int:
        return self.outer_iterations

    def check(self, model: Model, task: str) -> None:
        if self.gradient == "exact" and self.outer == "path":
            raise ConfigError('algorithm.outer = "path" has a first-order gradient only; use "final" or "holdout"')

    def check_solver(self, solver: Solver) -> None:
        if self.outer == "path" and not solver.is_plain:
            raise ConfigError(
                'algorithm.outer = "path" reads gradients off a client\'s move: use plain sgd in [local] (no momentum, '
                'weight_decay or clip), or outer = "final" or "holdout"'
            )

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params, "start": model.params}

    local: ClassVar[Any] = FedAvg.local

    def models(self, fed: Federation, w: Params) -> Placed:
        """What is averaged."""
        return fed.map(self.local, w)[0]

    def round(self, fed: Federation, server: Tree) -> Tree:
        if "learned" not in server:
            server = server | self.first(fed)
        if fed.round <= 0:
            return self.outer_iteration(fed, server)
        t = min(fed.round, self.horizon) - 1
        step = self.average(fed, server["theta"], server["w"], t, server["answers"], None)
        fed.report(weights=list(step.share))
        return server | {"w": step.w, "answers": step.answers}

    def first(self, fed: Federation) -> Tree:
        """theta = sqrt(n / N), the weights of FedAvg; a rule starts there as well."""
        n = fed.samples(range(fed.clients))
        theta = (n / n.sum()).sqrt().repeat(self.horizon, 1) if self.weights == "table" else n.new_zeros(FEATURES)
        lowest = torch.tensor(torch.inf, dtype=theta.dtype)
        return {"learned": learnable(theta), "theta": theta, "lowest": lowest, "answers": torch.zeros_like(n)}

    def outer_iteration(self, fed: Federation, server: Tree) -> Tree:
        """T rounds from the start, the derivative of L by theta, a step of Adam."""
        theta, w, answers = server["learned"]["x"].detach().requires_grad_(), server["start"], server["answers"]
        exact = self.gradient == "exact"
        unfolded = fed.tape(theta) if exact else theta
        steps: list[Average] = []
        for t in range(self.horizon):
            with fed.exchange(t, ask_all=exact) as arriving:
                steps.append(self.average(fed, unfolded, w, t, answers, arriving if exact else None))
                w, answers = steps[-1].w, steps[-1].answers
        if exact:
            loss = fed.sum(fed.map(self.end, w))
            gradient = fed.backward(loss)
        else:
            slopes, losses = fed.map(self.end_and_slope, w)
            loss, a, pulls = fed.sum(losses), vector(fed.sum(slopes)), []
            for step in reversed(steps):
                pulls.append((step.apart @ a).to(theta.dtype))  # dL / dTheta
                a = a - step.moved / fed.solver.lr if self.outer == "path" else a
            (gradient,) = torch.autograd.grad([step.share for step in reversed(steps)], theta, pulls)
        loss, learned = loss.detach().to(theta.dtype), adam(server["learned"], gradient, self.outer_lr)
        weights = torch.stack([step.share.detach() for step in steps])
        fed.report(outer_loss=loss, variance_of_weights=weights.var(0, correction=0).mean())
        if self.outer != "holdout":
            return server | {"learned": learned, "theta": learned["x"]}
        best = {"theta": theta.detach(), "lowest": loss} if loss < server["lowest"] else {}  # stop at the best
        return server | {"learned": learned} | best

    def average(
        self, fed: Federation, theta: Tensor, w: Params, t: int, answers: Tensor, arriving: tuple[int, ...] | None
    ) -> Average:
        """w + sum Theta (w_k - w); who did not answer has w_k = w, or no weight if the environment renormalises."""
        rows = list(fed.asked)
        moves = torch.zeros(len(rows), sum(v.numel() for v in w.values()), dtype=next(iter(w.values())).dtype)
        losses = moves.new_zeros(len(rows))
        if fed.cohort:
            models = self.models(fed, w)
            at = torch.tensor([rows.index(c) for c in models.clients])
            moves = moves.index_copy(0, at, vector(models.tree, stacked=True) - vector(w))
            if self.weights == "rule":
                losses = losses.index_copy(0, at, fed.aside(self.end, w).of(models.clients))
        here = torch.tensor([c in set(fed.cohort if arriving is None else arriving) for c in rows])
        moves = moves * here[:, None].to(moves.dtype)
        n = fed.samples(rows)
        if self.weights == "table":
            score = theta[t, rows].square()
        else:
            taken_part = answers[rows] / max(t, 1)
            score = n * (seen(moves, n, losses / n.to(losses.dtype), taken_part, t / self.horizon) @ theta).exp()
        counts = here if fed.environment.missing == "renormalise" else torch.ones_like(here)
        answers = answers.index_add(0, torch.tensor(rows), here.to(answers.dtype))
        return average(w, moves, score, counts, answers, through=self.gradient == "exact")

    @on_client(sends=NUMBER)
    def end(self, me: Me, w: Params) -> tuple[Tree, Tree]:
        """The client's part of L at the common model w."""
        return me.state, self.outer_loss(me, w)

    @on_client(sends=(MODEL, NUMBER))
    def end_and_slope(self, me: Me, w: Params) -> tuple[Tree, Tree]:
        trained = {k: v for k, v in w.items() if k in me.model.trainable}
        slope, loss = torch.func.grad_and_value(lambda part: self.outer_loss(me, w | part))(trained)
        return me.state, (tree_map(torch.zeros_like, w) | slope, loss)

    def outer_loss(self, me: Me, w: Params) -> Tensor:
        if self.outer == "holdout":
            return me.val.mask.sum() * me.loss(w, "val")
        return me.steps(self.epochs) * me.loss(w)

    def personal(self, me: Me, server: Tree) -> Params:
        return server["w"]
