"""One outer epoch of Learn2pFed for all clients at once: cells (9)-(12) on stacks, and their adjoint in closed form.

The same numbers as the text of the algorithm gives call by call, for clients that share a process. Tensors are
[clients, features, outputs]; `bar` is the derivative of the outer loss.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtailor.algorithms._shared import learnables
from fedtailor.core.context import View
from fedtailor.core.federation import Exchange, FusedRound
from fedtailor.core.trees import Params, Tree, tree_map

SMALL = 1_000_000  # numbers
BLOCK = 131_072  # numbers of a vector of all clients of a block


class Numbers(NamedTuple):
    """The learned numbers of a cell and what follows from them alone."""

    x: Params
    inverse: Tensor  # (A + rho)^-1
    shrink: Tensor  # eta / (lam + eta)
    weight: Tensor  # p gamma


class CellTrace(NamedTuple):
    """What the way back needs of a cell."""

    w: Tensor  # before the cell, as z and v in `off`
    off: Tensor  # z - v + w
    missed: Tensor  # w + z + a - v of the v-step
    apart: Tensor  # v - w - a
    sent: Tensor  # v - z - a


class Bars(NamedTuple):
    """Derivatives met on the way back through a cell."""

    w: Tensor
    z: Tensor
    r: Tensor  # (A + rho)^-1 v_bar
    a: Tensor


def fused_epoch(algorithm: Any, state: Tree, server: Tree, samples: Callable[[], View]) -> FusedRound | None:
    """The outer epoch of `algorithm`; None if no client has data for the outer loss."""
    data = state["held"] if algorithm.outer == "holdout" else state["d"]
    learned, w = state["learned"], server["w"]
    count = data["n"].sum()
    if count == 0:
        return None
    count = algorithm.divisor(count)
    both = {"state": state, "samples": tuple(samples()) if algorithm.outer == "loo" else ()}
    with torch.no_grad():
        parts = list(_blocks_of(both))
        blocks = [_Block(algorithm, part["state"], w.shape) for part in parts]
        totals = [torch.stack(each).sum(0) for each in zip(*(b.totals() for b in blocks), strict=True)]
        forward = [b.forward(w) for b in blocks]
        after = _run_in_step(forward, lambda sums, i: sums / totals[i])  # (12)
        w = after[-1]
        exact = algorithm.gradient == "exact"
        starts = [b.outer_slopes(w, count, p["samples"]) for b, p in zip(blocks, parts, strict=True)]
        w_bar = torch.stack([s for _, s in starts]).sum(0)
        ways_back = [b.back(v, w_bar, totals, exact=exact) for b, (v, _) in zip(blocks, starts, strict=True)]
        _run_in_step(ways_back, lambda sums, i: sums)
        gradient = torch.cat([b.by_raw(totals, after) for b in blocks])
        v, z, a = (torch.cat([getattr(b, name) for b in blocks]) for name in "vza")
        largest = torch.stack([b.largest() for b in blocks]).max() * w.numel() ** 0.5  # at least the largest norm
    exchanges = [
        Exchange("cell", (w, w.new_zeros((), dtype=torch.int64)), algorithm.cells, taped=True),
        Exchange("outer_loss", (w,), 1, taped=True),
    ]
    shrink = algorithm.clipping((learnables.learned_entries(gradient, algorithm.learned) * gradient).square().sum())
    exchanges += [] if shrink is None else [Exchange("slope", (), 1, taped=False)]
    exchanges.append(Exchange("learn", () if shrink is None else (shrink,), 1, taped=False))
    learned = algorithm.step(learned, gradient, shrink)
    replies = learnables.degrees(gradient if algorithm.pull else learned["raw"])
    common = algorithm.common_step(server["common"], replies.sum(0) if algorithm.pull else replies.mean(0), shrink)
    if algorithm.pull:
        degrees = learnables.degrees(common["raw"])
        learned = learned | {"raw": learnables.pull_degrees(learned["raw"], degrees, algorithm.pull)}
        exchanges.append(Exchange("agree", (degrees,), 1, taped=False))
    new_states = state | {"v": v, "z": z, "a": a, "learned": learned}
    return FusedRound(new_states, server | {"w": w, "common": common}, largest, exchanges)


def _blocks_of(both: Tree) -> Iterator[Tree]:
    """Blocks of clients whose vectors stay in the cache of a core."""
    clients, numbers = both["state"]["v"].shape[0], both["state"]["v"][0].numel()
    size = max(1, BLOCK // numbers)
    if clients <= size:
        yield both
        return
    for first in range(0, clients, size):
        yield tree_map(lambda x, first=first: x[first : first + size], both)


def _run_in_step(
    blocks: list[Generator[Tensor, Tensor, None]], answer: Callable[[Tensor, int], Tensor]
) -> list[Tensor]:
    """Run blocks side by side: what they yield is summed, and all are sent the answer to it; returns the answers."""
    answers: list[Tensor] = []
    sums = [next(block) for block in blocks]
    while sums:
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        answers.append(answer(total, len(answers)))
        sums = []
        for block in blocks:
            with suppress(StopIteration):
                sums.append(block.send(answers[-1]))
    return answers


class _Block:
    """Some clients on their way through the cells and back."""

    def __init__(self, algorithm: Any, state: Tree, shape: torch.Size) -> None:
        self.algorithm, self.state = algorithm, state
        self.direct = torch.zeros_like(self.raw)  # by the learned numbers, not by way of the cells
        self.v, self.z, self.a = state["v"], state["z"], state["a"]
        sets = self.raw.unbind(1) if algorithm.per_cell else [self.raw]
        self.sets = [_numbers(state["d"], learnables.positive_numbers(one, shape, algorithm.positive)) for one in sets]
        self.numbers = self.sets * (1 if algorithm.per_cell else algorithm.cells)
        self.cells: list[CellTrace] = []
        self.bars: list[Bars] = []

    @property
    def raw(self) -> Tensor:
        """The learned numbers before they are mapped to where they may lie."""
        return self.state["learned"]["raw"]

    def totals(self) -> list[Tensor]:
        """The weight of the block's clients in each cell."""
        return [n.weight.sum(0) for n in self.numbers]

    def forward(self, w: Tensor) -> Generator[Tensor, Tensor, None]:
        """Yields the weighted sum of what the clients send in each cell, and is sent w."""
        v, z, a, b = self.v, self.z, self.a, self.state["d"]["b"]
        for n in self.numbers:
            before, off = w, z - v + w
            a = torch.addcmul(a, n.x["theta"], off)  # (9)
            center = w + z + a
            v = n.inverse @ torch.addcmul(b, n.x["rho"], center)  # (10)
            missed = center.sub_(v)
            rest = v - a
            apart = rest - w
            z = n.shrink * apart  # (11)
            sent = rest - z
            self.cells.append(CellTrace(before, off, missed, apart, sent))
            self.v, self.z, self.a = v, z, a
            w = yield (n.weight * sent).sum(0)

    def outer_slopes(self, w: Tensor, count: Tensor, samples: Any) -> tuple[Tensor, Tensor]:
        """The derivative of the outer loss by the last v and, the block's part of it, by w; `direct` is kept."""
        if not self.algorithm.judges_served:
            data = self.state["held" if self.algorithm.outer == "holdout" else "d"]
            return 2 / count * (data["A"] @ self.v - data["b"]), torch.zeros_like(w)

        def error(raw: Tensor, w: Tensor) -> Tensor:
            def of_one(raw: Tensor, data: Tree, samples: Any) -> Tensor:
                state = data | {"learned": {"raw": raw}}
                return self.algorithm.served_error(state, View(*samples) if samples else None, w)

            data = {k: self.state[k] for k in ("d", "held") if k in self.state}
            total: Tensor = torch.vmap(of_one)(raw, data, samples).sum() / count
            return total

        self.direct, slope = torch.func.grad(error, argnums=(0, 1))(self.raw, w)
        return torch.zeros_like(self.v), slope

    def back(self, v: Tensor, w: Tensor, totals: list[Tensor], *, exact: bool) -> Generator[Tensor, Tensor, None]:
        """From the derivatives by the last v and w to those in every cell; yields the block's part of the one by w."""
        z = a = torch.zeros_like(v)
        w = w if exact else torch.zeros_like(w)
        for n, total in zip(reversed(self.numbers), reversed(totals), strict=True):
            w_bar = w
            if exact:
                u = n.weight * (w / total)
                v, z, a = v + u, z - u, a - u
            z_bar, q = z, n.shrink * z
            r = n.inverse @ (v + q)
            pulled = n.x["rho"] * r
            a = a - q + pulled
            step = n.x["theta"] * a
            z, v = pulled + step, -step
            self.bars.insert(0, Bars(w_bar, z_bar, r, a))
            part = yield (z - q).sum(0)
            w = part if exact else w

    def by_raw(self, totals: list[Tensor], after: list[Tensor]) -> Tensor:
        """The derivative by the raw learned numbers; `after` is w after each cell."""
        each = list(zip(self.cells, self.bars, totals, after, strict=True))
        own = [[one] for one in each] if len(self.sets) > 1 else [each]
        slopes = [_by_numbers(n, part) for n, part in zip(self.sets, own, strict=True)]
        return self.direct + learnables.by_raw(self.raw, slopes, self.algorithm.positive)

    def largest(self) -> Tensor:
        sent = self.cells[0].sent.abs()
        for cell in self.cells[1:]:
            torch.maximum(sent, cell.sent.abs(), out=sent)
        weight = self.sets[0].weight if len(self.sets) == 1 else torch.stack([n.weight for n in self.sets]).amax(0)
        return (weight * sent).max()


def _numbers(d: Params, x: Params) -> Numbers:
    inverse = (d["q"] / (d["s"] + x["rho"][..., 0])[:, None]) @ d["q"].mT
    return Numbers(x, inverse, x["eta"] / (x["lam"] + x["eta"]), x["p"] * x["gamma"])


def _by_numbers(n: Numbers, each: list[tuple[CellTrace, Bars, Tensor, Tensor]]) -> Params:
    """Derivatives by numbers that these cells, with the total weight and w after each, have in common."""

    def products(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Sum over the cells of products; stacked where that is small, which saves calls."""
        if n.shrink.numel() * len(pairs) < SMALL:
            return (torch.stack([a for a, _ in pairs]) * torch.stack([b for _, b in pairs])).sum(0)
        total = torch.zeros_like(n.shrink)
        for a, b in pairs:
            total.addcmul_(a, b)
        return total

    def inner(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        return products(pairs).sum((1, 2), keepdim=True)

    by_shrink = products([(b.z, c.apart) for c, b, _, _ in each])
    by_sum = by_shrink / (n.x["lam"] + n.x["eta"])
    by_weight = inner([((b.w / total).expand_as(c.sent), c.sent - w) for c, b, total, w in each])
    return {
        "lam": -n.shrink * by_sum,
        "eta": ((1 - n.shrink) * by_sum).sum((1, 2), keepdim=True),
        "rho": inner([(b.r, c.missed) for c, b, _, _ in each]),
        "theta": inner([(b.a, c.off) for c, b, _, _ in each]),
        "p": n.x["gamma"] * by_weight,
        "gamma": n.x["p"] * by_weight,
    }
