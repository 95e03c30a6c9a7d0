"""Unrolled ADMM as a round: cells 1 to L from a start, the outer loss, its gradient through all cells, a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared import learnables
from fedtailor.core.algorithm import NUMBER, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError

DEGREES = ReplySpec(
    "degrees", lambda algorithm, model: learnables.degrees(algorithm.server_init(model)["common"]["raw"])
)


@dataclass(frozen=True)
class UnrolledCells(learnables.Learnables):
    """Part of an algorithm with client functions `cell` and `outer_loss`, and v, z, a and `learned` in its states."""

    pull: float = 1.0
    """Degrees: 0 private, 1 common to all; in between, private and pulled towards the common ones."""
    gradient: Literal["exact", "local"] = "exact"
    """Differentiate through the whole federation, or treat the common model as constant."""
    sum_loss: bool = False
    """The outer loss is the sum of the clients' F, as in (13), not the mean over samples (released code); the same for
    Adam, where F is a sum over samples."""
    start: Literal["last", "fixed", "drawn"] = "last"
    """Where a round's first cell starts: where the last round ended; at v and w drawn once (paper); or drawn anew in
    every round (released code)."""
    spread: float = 1.0
    """Standard deviation of a start that is drawn."""

    @property
    def counts_all(self) -> bool:  # in place of a constant of the class: only p needs N
        """Whether the number of all samples is in the equations."""
        return self.weights == "samples"

    def check_options(self) -> None:
        """Refuse what contradicts itself."""
        if self.weights == "samples" and self.reach and "p" in self.learned:
            raise ConfigError('algorithm.weights = "samples": p has no bounds about 1; set algorithm.reach = 0')

    def cell(self, me: ClientContext, w: Tensor, cell: Tensor) -> tuple[Tree, Tree]:
        """The client's part of a cell, which sends p gamma (v - z - a) and p gamma."""
        raise NotImplementedError

    def outer_loss(self, me: ClientContext, w: Tensor) -> tuple[Tree, Tree]:
        """Sends the sum of the outer loss over samples, and their number."""
        raise NotImplementedError

    # where a round starts

    def first_state(self, me: ClientContext, v: Tensor) -> Tree:
        """Private state before the first round."""
        zero = torch.zeros_like(v)
        state = {"v": v, "z": zero, "a": zero, "learned": self.first_numbers(v)}
        return state | ({"start": self.draw(me, v)} if self.start == "fixed" else {})

    def draw(self, me: ClientContext, like: Tensor) -> Tensor:
        """Normal numbers of this client."""
        u = me.uniform(like.numel()).to(like.dtype).clamp(1e-7, 1 - 1e-7)
        return (self.spread * sqrt(2) * torch.erfinv(2 * u - 1)).reshape(like.shape)

    def begin_epoch(self, fed: Federation, server: Tree) -> Tree:
        """The server's state before the first cell, after all clients have gone to their starts."""
        if self.start == "last" and self.weights == "equal":
            return server
        w, key = server["w"], (fed.seed, "Learn2pFed", "w")
        if self.start != "last":
            numbers = stream(*key, *((fed.round,) if self.start == "drawn" else ())).normal(size=w.shape)
            w = self.spread * torch.from_numpy(numbers).to(w)
        fed.map(self.begin, w, fed.samples(range(fed.clients)).sum())
        return server | {"w": w}

    @on_client()
    def begin(self, me: ClientContext, w: Tensor, total: Tensor) -> tuple[Tree, Tree]:
        return self.restart(me, w, total), None

    def restart(self, me: ClientContext, w: Tensor, total: Tensor) -> Tree:
        """The state at the start of a round: z = v - w and a = 0; before the first step, p = n_i / N."""
        s, learned = me.state, me.state["learned"]
        if self.weights == "samples":
            weighted = learnables.with_weight(learned["raw"], me.n / total, self.positive)
            s = s | {"learned": learned | {"raw": torch.where(learned["steps"] == 0, weighted, learned["raw"])}}
        if self.start == "last":
            return s
        v = s["start"] if self.start == "fixed" else self.draw(me, w)
        return s | {"v": v, "z": v - w, "a": torch.zeros_like(v)}

    # an epoch

    def run_cells(self, fed: Federation, w: Tensor) -> Iterator[Tensor]:
        """The common model after each cell."""
        for cell in range(self.cells):
            top, bottom = fed.map(self.cell, w, fed.places([cell])[0])
            w = fed.sum(top) / fed.sum(bottom)  # (12)
            w = w if self.gradient == "exact" else w.detach()
            yield w

    def mean_outer_loss(self, fed: Federation, w: Tensor, *, may_be_empty: bool = False) -> Tensor:
        """(13), divided by the number of samples unless it is to be a sum."""
        wrong, count = fed.map(self.outer_loss, w)
        samples = fed.sum(count)
        if samples == 0 and not may_be_empty:
            raise ConfigError('algorithm.outer = "holdout": no client has validation samples; raise data.val')
        loss: Tensor = fed.sum(wrong) / self.divisor(samples)
        return loss

    def divisor(self, samples: Tensor) -> Tensor:
        """What the sum of the outer loss over samples is divided by."""
        return torch.ones_like(samples) if self.sum_loss else samples.clamp(min=1)

    def learn_from(self, fed: Federation, server: Tree, loss: Tensor) -> Tree:
        """The common degrees after the gradient of `loss` has gone back to all clients, and each has taken a step."""
        fed.backward(loss)
        shrink = self.clipping(fed.sum(fed.map(self.slope))) if self.optimizer == "sgd" else None
        replies = fed.map(self.learn, *([] if shrink is None else [shrink]))
        common = self.common_step(server["common"], fed.sum(replies) if self.pull else fed.mean(replies), shrink)
        if self.pull:
            fed.map(self.agree, learnables.degrees(common["raw"]))
        return common

    def common_step(self, common: Tree, replies: Tensor, shrink: Tensor | None) -> Tree:
        """The common degrees after one step on the clients' summed gradient; without a pull they are the mean ones."""
        scalars = common["raw"][..., -len(learnables.SCALARS) :]
        if self.pull:
            return self.step(common, torch.cat([replies, torch.zeros_like(scalars)], dim=-1), shrink)
        return common | {"raw": torch.cat([replies, scalars], dim=-1)}

    @on_client(sends=NUMBER.summed())
    def slope(self, me: ClientContext) -> tuple[Tree, Tree]:
        """Squared norm of the gradient of the outer loss by what this client learns."""
        gradient = me.grad["learned"]["raw"]
        return me.state, (learnables.learned_entries(gradient, self.learned) * gradient).square().sum()

    @on_client(sends=DEGREES.summed())
    def learn(self, me: ClientContext, shrink: Tensor | None = None) -> tuple[Tree, Tree]:
        gradient = me.grad["learned"]["raw"]
        learned = self.step(me.state["learned"], gradient, shrink)
        state = me.state | self.beside(me) | {"learned": learned}
        return state, learnables.degrees(gradient if self.pull else learned["raw"])

    def beside(self, me: ClientContext) -> dict[str, Any]:
        """What of the private state changes with the learned numbers."""
        return {}

    @on_client()
    def agree(self, me: ClientContext, common: Tensor) -> tuple[Tree, Tree]:
        learned = me.state["learned"]
        pulled = learnables.pull_degrees(learned["raw"], common, self.pull)
        return me.state | {"learned": learned | {"raw": pulled}}, None
