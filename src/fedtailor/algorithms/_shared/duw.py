"""DUW: learn a weight for each client and round of the average. Nakai-Kasai, Wadayama, 2024, Algorithms 3 and 4.

Symbols: theta learned; Theta = theta^2 / sum theta^2 weights of a round; L outer loss, of M outer iterations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared import unfolding
from fedtailor.core.algorithm import MODEL, NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Params, Tree, flat, tree_map
from fedtailor.errors import ConfigError


@dataclass(frozen=True)
class DUW(Algorithm, ABC):
    """Weights are learned by unfolding rounds in the very environment in which they take place."""

    epochs: int = 1
    """Local epochs per round."""
    horizon: int = 10
    """T: unrolled rounds; later ones use the weights of the last."""
    outer_iterations: int = 50
    """M: how often these rounds are run to learn theta, before the actual run."""
    outer_lr: float = 0.005
    """Step size of theta (Adam)."""
    outer: Literal["path", "final", "holdout"] = "path"
    """L: training losses along all rounds and at the end (paper), at the end only, or validation loss at the end."""
    gradient: Literal["first-order", "exact"] = "first-order"
    """Treat local gradients as constants, in closed form (paper); or differentiate through them, for L at the end."""
    weights: Literal["table", "rule"] = "table"
    """A weight per client and round (paper), or a rule based on what the server sees, which transfers to others."""
    theta: tuple[float, ...] = ()
    """Start from what another run has learned (its last reported theta); outer_iterations = 0 uses it unchanged."""
    start: Literal["same", "anew"] = "same"
    """Each outer iteration begins with the model of the run, or with initial values drawn anew (paper)."""
    select: int = 0
    """In the run only this many clients of a round take part, those with the largest learned weights; 0: all."""
    mu: float = 0.0
    """Weight of a proximal term in the local loss, as in FedProx."""

    stale: ClassVar[bool] = True
    at_once: ClassVar[bool] = True
    by_client: ClassVar[tuple[str, ...]] = ("learned", "theta", "answers")
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"start": "anew", "outer_iterations": 400, "outer_lr": 0.001},
    }
    citation: ClassVar[str] = """@article{nakai2024deep, author={Nakai-Kasai, Ayano and Wadayama, Tadashi}, year={2024},
  title={Deep Unfolding-Based Weighted Averaging for Federated Learning in Heterogeneous Environments}}"""

    @property
    def preparation(self) -> int:
        return self.outer_iterations

    def check(self, model: Model, task: str) -> None:
        unfolding.check(self.gradient, self.outer, self.mu, model)
        if self.start == "anew":
            model.redraw("check")
        if self.select and self.weights == "rule":
            raise ConfigError('algorithm.select: a rule needs what clients send; use weights = "table"')

    def server_init(self, model: Model) -> Tree:
        return {"w": model.params, "start": model.params}

    @abstractmethod
    def rates(self, fed: Federation, rows: Sequence[int], here: Collection[int]) -> Tensor:
        """The step sizes of the clients of `rows`, of whom the replies of `here` arrive."""

    @abstractmethod
    def models(self, fed: Federation, w: Params, rates: Tensor) -> PerClient:
        """What is averaged: a model of each client of the cohort, who have these step sizes."""

    def round(self, fed: Federation, server: Tree) -> Tree:
        if "learned" not in server:
            server = server | unfolding.start(fed.samples(range(fed.clients)), self.horizon, self.weights, self.theta)
        if fed.round <= 0:
            return self.outer_iteration(fed, server)
        theta, w, answers, t = server["theta"], server["w"], server["answers"], min(fed.round, self.horizon) - 1
        rows, asked = list(fed.asked), len(fed.asked)
        if self.select and self.select < asked:
            best = sorted(theta[t, rows].square().topk(self.select).indices.tolist())
            rows = [rows[i] for i in best]
        with fed.among([c for c in fed.cohort if c in rows]) if len(rows) < asked else nullcontext():
            step = self.average(fed, theta, w, t, answers, rows, fed.cohort)
        at = fed.places([fed.asked.index(c) for c in rows])
        fed.report(weights=list(step.share.new_zeros(asked).index_add(0, at, step.share)))
        return server | {"w": step.w, "answers": step.answers}

    def outer_iteration(self, fed: Federation, server: Tree) -> Tree:
        """T rounds from the start, the derivative of L by theta, a step of Adam: lines 2 to 9."""
        theta, answers = server["learned"]["x"].detach().requires_grad_(), server["answers"]
        w = server["start"] if self.start == "same" else fed.model.redraw(fed.seed, "start", fed.round)  # line 2
        steps, unfolded = [], fed.tape(theta) if (exact := self.gradient == "exact") else theta
        for t in range(self.horizon):
            with fed.exchange(t, ask_all=exact) as arriving:
                step = self.average(fed, unfolded, w, t, answers, list(fed.asked), arriving)
            if self.outer == "path" and (failed := [c for c in fed.cohort if c not in arriving]):
                with fed.among(failed):  # whose update does not arrive has a loss as well: lines 5 and 8
                    slopes = fed.sum(fed.map(self.end_and_slope, w)[0])
                step = replace(step, slope=step.slope + flat(slopes))
            steps.append(step)
            w, answers = step.w, step.answers
        if exact:
            gradient = fed.backward(loss := fed.sum(fed.map(self.end, w)))
        else:
            slopes, losses = fed.map(self.end_and_slope, w)
            loss, gradient = fed.sum(losses), unfolding.first_order(steps, theta, fed.sum(slopes))
        server = server | unfolding.take_step(server, gradient, loss, self.outer_lr, keep_best=self.outer == "holdout")
        fed.report(outer_loss=loss.detach(), theta=[*server["theta"].flatten()], **unfolding.variance(steps))
        return server

    def average(
        self,
        fed: Federation,
        theta: Tensor,
        w: Params,
        t: int,
        answers: Tensor,
        rows: list[int],
        here: Collection[int],
    ) -> unfolding.Average:
        """w + sum Theta (w_k - w); who is not `here` has w_k = w, or no weight if the environment renormalises."""
        rates, models, losses = self.rates(fed, rows, here), None, None
        if fed.cohort:
            theirs = rates[[rows.index(c) for c in fed.cohort]]
            models = fed.gather(self.models(fed, w, theirs), "model of each client")
        if self.weights == "rule" and fed.cohort:
            losses = fed.gather(fed.map_untaped(self.end, w), "loss of each client")
        at = fed.places([rows.index(c) for c in fed.cohort])  # fewer, if some were lost
        moves, arrived = unfolding.moves(w, models, at, rows, {*here} & {*fed.cohort})
        loss = unfolding.place_losses(losses, at, len(rows), moves)
        score = unfolding.scores(theta, moves, loss, fed.samples(rows), rows, answers, t, self.horizon)
        counts = arrived | (fed.environment.missing == "stale")
        answers = answers.index_add(0, fed.places(rows), arrived.to(answers.dtype))
        gradients_of = rates if self.outer == "path" else None
        return unfolding.average(w, moves, score, counts, answers, gradients_of, through=self.gradient == "exact")

    @on_client(sends=NUMBER.summed())
    def end(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, self.outer_loss(me, w)  # the client's part of L at the common model w

    @on_client(sends=(MODEL.summed(), NUMBER.summed()))
    def end_and_slope(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        trained = {k: v for k, v in w.items() if k in me.model.trainable}
        slope, loss = torch.func.grad_and_value(lambda part: self.outer_loss(me, w | part))(trained)
        return me.state, (tree_map(torch.zeros_like, w) | slope, loss)

    def outer_loss(self, me: ClientContext, w: Params) -> Tensor:
        return me.val.mask.sum() * me.loss(w, "val") if self.outer == "holdout" else me.steps(self.epochs) * me.loss(w)

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["w"]
