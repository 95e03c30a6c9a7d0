"""From one number per client to what is reported: mean, spread, worst tenth, share of clients hurt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev


@dataclass(frozen=True)
class Summary:
    """Over the clients that have samples to be measured on."""

    mean: float
    std: float
    worst_tenth: float
    clients: int


def summarise(values: Sequence[float], *, higher_is_better: bool) -> Summary:
    """Mean, standard deviation over clients, and mean of the worst tenth of them (at least one)."""
    known = sorted(v for v in values if not math.isnan(v))
    if not known:
        return Summary(math.nan, math.nan, math.nan, 0)
    average = sum(known) / len(known)
    std = math.sqrt(sum((v - average) ** 2 for v in known) / len(known)) if math.isfinite(average) else math.inf
    tenth = max(1, round(len(known) / 10))
    worst = known[:tenth] if higher_is_better else known[-tenth:]
    return Summary(average, std, sum(worst) / tenth, len(known))


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and spread of several runs; the spread is not a number for one of them, or if one failed without limit."""
    is_spread = len(values) > 1 and all(map(math.isfinite, values))
    return mean(values), stdev(values) if is_spread else math.nan


def share_hurt(values: Sequence[float], local: Sequence[float], *, higher_is_better: bool) -> float:
    """Share of clients that are worse off than when they train alone."""
    pairs = [(v, w) for v, w in zip(values, local, strict=True) if not (math.isnan(v) or math.isnan(w))]
    if not pairs:
        return math.nan
    return sum((v < w) if higher_is_better else (v > w) for v, w in pairs) / len(pairs)
