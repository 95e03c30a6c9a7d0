"""Means that a few clients cannot move far, whatever they send. `rows` has one client per row.

Median and trimmed mean: Yin et al., ICML 2018. Krum: Blanchard et al., NeurIPS 2017. Geometric median: Pillutla et al.,
IEEE TSP 2022. Neighbours: Allouah et al., AISTATS 2023. All of them count every client once: a weight would be one more
thing to lie about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor.core.federation import Federation
from fedtailor.core.reduce import Open, PerClient
from fedtailor.core.trees import Tree, leaves, rebuild
from fedtailor.errors import ConfigError

MeanName = Literal["clients", "median", "trimmed", "geometric", "krum", "clipped"]
STEPS = 32  # of the geometric median


@dataclass(frozen=True)
class Robust:
    """A reduction for federations in which up to a share of the clients may lie; weights do not count."""

    name: MeanName
    liars: float  # share of the clients
    neighbours: bool = True  # rows are means of their nearest ones first

    hides = ""
    is_sealed = False

    def sum(self, fed: Federation, x: PerClient, weight: PerClient | None) -> tuple[Tree, Tensor]:
        """As many times the robust mean as there are clients; whole numbers are added up."""
        exact, count = Open().sum(fed, x, None)
        means = zip(leaves(exact), leaves(self._mean(fed, x)), strict=True)
        return rebuild(exact, (count * v if v.is_floating_point() else added for added, v in means)), count

    def _mean(self, fed: Federation, x: PerClient) -> Tree:
        """Reported are how far each client is from it, in multiples of the median distance, and who is left out."""
        tree = x.rows(fed.group)
        each = leaves(tree)
        if not each:
            return tree
        rows = torch.cat([v.reshape(len(v), -1).double() for v in each], dim=1)  # some are single numbers
        liars = math.floor(self.liars * len(rows))
        mixed = mixed_rows(rows, liars) if self.neighbours and self.name not in ("clients", "krum") else rows
        center = MEANS[self.name](mixed, liars)
        away = (rows - center).norm(dim=1)
        _report(fed, "distance", away / away.median().clamp(min=1e-300))
        if self.name == "krum":
            _report(fed, "left_out", rows.new_ones(len(rows)).index_fill(0, nearest(rows, liars), 0.0))
        parts = zip(center.split([v[0].numel() for v in each]), each, strict=True)
        return rebuild(tree, (part.reshape(v.shape[1:]).to(v.dtype) for part, v in parts))

    def refuse_tape(self, title: str) -> None:
        """A robust mean is no linear function of the replies."""
        raise ConfigError(f"aggregation.mean: {title} differentiates through its rounds, and so through its means")

    def check(self, experiment: Any) -> None:
        """It suits every experiment in which a mean is taken."""


def _report(fed: Federation, name: str, values: Tensor) -> None:
    """Of several means of a round each client's largest number."""
    before = values.new_tensor(fed.record.reported.get(name, [0.0] * len(values)))
    fed.report(**{name: list(torch.maximum(before, values) if len(before) == len(values) else values)})


def clients_mean(rows: Tensor, liars: int) -> Tensor:
    """Every client the same, whatever number of samples it claims to have."""
    return rows.mean(0)


def median(rows: Tensor, liars: int) -> Tensor:
    ordered = rows.sort(0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def trimmed(rows: Tensor, liars: int) -> Tensor:
    """The mean of every coordinate without the largest and the smallest values, as many as may lie of each."""
    _few(rows, liars, 2 * liars + 1, "trimmed")
    return rows.sort(0).values[liars : len(rows) - liars].mean(0)


def geometric(rows: Tensor, liars: int) -> Tensor:
    """The point with the least sum of distances, by Weiszfeld's iteration."""
    center = median(rows, liars)
    for _ in range(STEPS):
        away = (rows - center).norm(dim=1)
        weight = 1 / away.clamp(min=1e-6 * float(away.max()) + 1e-300)
        center = (weight[:, None] * rows).sum(0) / weight.sum()
    return center


def krum(rows: Tensor, liars: int) -> Tensor:
    """The mean of those that are nearest to their neighbours (Multi-Krum), without as many as may lie."""
    _few(rows, liars, liars + 3, "krum")
    return rows[nearest(rows, liars)].mean(0)


def nearest(rows: Tensor, liars: int) -> Tensor:
    """All but as many as may lie, by the sum of squared distances to their neighbours."""
    apart = torch.cdist(rows, rows).square().sort(1).values[:, 1 : len(rows) - liars - 1]
    return apart.sum(1).topk(len(rows) - liars, largest=False).indices


def mixed_rows(rows: Tensor, liars: int) -> Tensor:
    """Every row the mean of its nearest ones, itself among them, without as many as may lie.

    Honest clients differ by chance, and a coordinate's middle is moved by liars as far as that goes; means of many
    honest rows differ little.
    """
    close = torch.cdist(rows, rows).topk(len(rows) - liars, largest=False).indices
    return rows[close].mean(1)


def clipped(rows: Tensor, liars: int) -> Tensor:
    """The mean after everybody is brought to within the median distance from the coordinate-wise median."""
    center = median(rows, liars)
    moves = rows - center
    away = moves.norm(dim=1)
    return center + (moves * (away.median() / away.clamp(min=1e-300)).clamp(max=1)[:, None]).mean(0)


def _few(rows: Tensor, liars: int, least: int, name: str) -> None:
    if len(rows) < least:
        raise ConfigError(
            f'aggregation.mean = "{name}": {len(rows)} clients of which {liars} may lie; at least {least} are needed'
        )


MEANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "clients": clients_mean,
    "median": median,
    "trimmed": trimmed,
    "geometric": geometric,
    "krum": krum,
    "clipped": clipped,
}
