"""One outer epoch of Learn2pFed for all clients at once: cells (9)-(12) on stacks, and their adjoint in closed form.

The same numbers as the text of the algorithm gives call by call, for clients that share a process. Tensors are
[clients, features, outputs]; `bar` is the derivative of the outer loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedtailor.core.algorithm import NUMBER, on_client
from fedtailor.core.federation import AtOnce
from fedtailor.core.me import Me
from fedtailor.core.trees import Params, Tree
from fedtailor.local import learnables, ridge

if TYPE_CHECKING:
    from fedtailor.algorithms.learn2pfed import Learn2pFed


SMALL = 1_000_000  # numbers


class Numbers(NamedTuple):
    """The learned numbers of a cell and what follows from them alone."""

    x: Params
    inverse: Tensor  # (A + rho)^-1
    shrink: Tensor  # eta / (lam + eta)
    weight: Tensor  # p gamma
    total: Tensor  # sum of the weights


class Cell(NamedTuple):
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


def at_once(algorithm: Learn2pFed, state: Tree, server: Tree) -> AtOnce | None:
    """The outer epoch of `algorithm`; None if no client has data for the outer loss."""
    data = state["held"] if algorithm.outer == "holdout" else state["d"]
    learned, w = state["learned"], server["w"]
    count = data["n"].sum()
    if count == 0:
        return None
    raw = learned["raw"]
    with torch.no_grad():
        sets = raw.unbind(1) if algorithm.per_cell else [raw]
        numbers = [_numbers(state["d"], learnables.read(one, w.shape, algorithm.positive)) for one in sets]
        numbers *= 1 if algorithm.per_cell else algorithm.cells
        cells, v, z, a, w = _forward(state, w, numbers)
        v_bar = 2 / count * (data["A"] @ v - data["b"])
        bars = _back(numbers, cells, v_bar, exact=algorithm.gradient == "exact")
        after = [*(c.w for c in cells[1:]), w]
        if algorithm.per_cell:
            found = [_by_numbers(n, [c], [b], [u]) for n, c, b, u in zip(numbers, cells, bars, after, strict=True)]
        else:
            found = [_by_numbers(numbers[0], cells, bars, after)]
        gradient = learnables.by_raw(raw, found, algorithm.positive)
        sent = cells[0].sent.abs()
        for c in cells[1:]:
            torch.maximum(sent, c.sent.abs(), out=sent)
        weight = numbers[0].weight if not algorithm.per_cell else torch.stack([n.weight for n in numbers]).amax(0)
        largest = (weight * sent).max() * w.numel() ** 0.5  # at least the norm of the largest reply
    learned = algorithm.step(learned, gradient)
    exchanges: list[tuple[str, tuple[Tree, ...], int, bool]] = [
        ("cell", (w, torch.tensor(0)), algorithm.cells, True),
        ("outer_loss", (w,), 1, True),
        ("learn", (), 1, False),
    ]
    mean = learnables.degrees(learned["raw"]).mean(0)
    if algorithm.pull:
        learned = learned | {"raw": learnables.pulled(learned["raw"], mean, algorithm.pull)}
        exchanges += [("agree", (mean,), 1, False)]
    made = state | {"v": v, "z": z, "a": a, "learned": learned}
    return AtOnce(made, server | {"w": w, "degrees": mean}, largest, exchanges)


@on_client(sends=(NUMBER, NUMBER, NUMBER))
def diagnose(self: Learn2pFed, me: Me, w: Tensor, before: Tensor, cell: Tensor) -> tuple[Tree, Tree]:
    """This client's part of the augmented Lagrangian with the penalty rho |.|^2, and its squared residuals."""
    s = me.state
    x = self.numbers(s, w, cell)
    lam = x["rho"] / x["eta"] * x["lam"]
    off, dual = s["v"] - w - s["z"], s["a"]
    coupled = (lam * s["z"].square()).sum() + (x["rho"] * ((off - dual).square() - dual.square())).sum()
    value = x["p"].squeeze() * (ridge.squared_error(s["d"], s["v"]) + coupled)
    return s, (value, off.square().sum(), (x["rho"] * (w - before)).square().sum())


@on_client(sends=NUMBER)
def slope(self: Learn2pFed, me: Me) -> tuple[Tree, Tree]:
    """Squared norm of the gradient of the outer loss by this client's numbers."""
    return me.state, me.grad["learned"]["raw"].square().sum()


def _numbers(d: Params, x: Params) -> Numbers:
    inverse = (d["q"] / (d["s"] + x["rho"][..., 0])[:, None]) @ d["q"].mT
    weight = x["p"] * x["gamma"]
    return Numbers(x, inverse, x["eta"] / (x["lam"] + x["eta"]), weight, weight.sum(0))


def _forward(state: Tree, w: Tensor, numbers: list[Numbers]) -> tuple[list[Cell], Tensor, Tensor, Tensor, Tensor]:
    """The cells, and v, z, a and w after the last."""
    v, z, a = state["v"], state["z"], state["a"]
    cells = []
    for n in numbers:
        before, off = w, z - v + w
        a = torch.addcmul(a, n.x["theta"], off)  # (9)
        center = w + z + a
        v = n.inverse @ torch.addcmul(state["d"]["b"], n.x["rho"], center)  # (10)
        missed = center.sub_(v)
        rest = v - a
        apart = rest - w
        z = n.shrink * apart  # (11)
        sent = rest - z
        w = (n.weight * sent).sum(0) / n.total  # (12)
        cells.append(Cell(before, off, missed, apart, sent))
    return cells, v, z, a, w


def _back(numbers: list[Numbers], cells: list[Cell], v: Tensor, *, exact: bool) -> list[Bars]:
    """From the derivative by the last v to those in every cell; the first cell first."""
    z = a = torch.zeros_like(v)
    w = torch.zeros_like(cells[0].w)
    bars = []
    for n in reversed(numbers):
        w_bar = w
        if exact:
            u = n.weight * (w / n.total)
            v, z, a = v + u, z - u, a - u
        z_bar, q = z, n.shrink * z
        r = n.inverse @ (v + q)
        pulled = n.x["rho"] * r
        a = a - q + pulled
        step = n.x["theta"] * a
        z, v = pulled + step, -step
        w = (z - q).sum(0) if exact else w
        bars.append(Bars(w_bar, z_bar, r, a))
    return bars[::-1]


def _by_numbers(n: Numbers, cells: list[Cell], bars: list[Bars], after: list[Tensor]) -> Params:
    """Derivatives by numbers that these cells have in common; `after` is w after each cell."""

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

    each = list(zip(bars, cells, strict=True))
    by_shrink = products([(b.z, c.apart) for b, c in each])
    by_sum = by_shrink / (n.x["lam"] + n.x["eta"])
    moved = [((b.w / n.total).expand_as(c.sent), c.sent - w) for (b, c), w in zip(each, after, strict=True)]
    by_weight = inner(moved)
    return {
        "lam": -n.shrink * by_sum,
        "eta": ((1 - n.shrink) * by_sum).sum((1, 2), keepdim=True),
        "rho": inner([(b.r, c.missed) for b, c in each]),
        "theta": inner([(b.a, c.off) for b, c in each]),
        "p": n.x["gamma"] * by_weight,
        "gamma": n.x["p"] * by_weight,
    }
