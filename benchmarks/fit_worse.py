"""The share of sites that are worse off with `fit` than with their best own model, beyond noise.

The best own model is the one with the smaller loss on these very test rows: it is known only in hindsight. Two tests at
2.5 %, one-sided, of what a site's rows lost:

- A paired t-test. For classes it is wrong where an outcome is rare: a site whose test rows are all of one class has
  nearly equal losses, so its t is huge however little is lost, although one row of the other class would turn it round.
- For classes therefore: what would be lost by chance. Outcomes of the test rows are drawn anew, 5000 times, from the
  probabilities that lie between the two models where both are equally good; the p-value is the share of draws in which
  fit loses as much as it did. Where both classes are frequent this is the paired test over again.

Of sites at which both models are equally good, 2.5 % fail such a test, and up to 5 % since the better of two own models
is taken afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fit_baselines import ALONE

Floats = NDArray[np.float64]
Chance = Callable[[Floats, tuple[Any, Any]], float]  # what was lost by row and class, and which classes it was
OURS = "fedtailor fit"
SURE, DRAWS, LEAST = 0.025, 5_000, 1e-6


def _losses(said: Floats, y: float) -> Floats:
    """Of one row: its squared error, or the log loss that it would have by class."""
    return -np.log(np.clip(said, LEAST, 1)) if len(said) > 1 else (said - y) ** 2


def worse(runs: list[dict[str, Any]], by_chance: Chance) -> float:
    """Share of sites whose best own model is better than fit's beyond noise; every row counts once."""
    held: dict[str, dict[int, list[Any]]] = {}
    for run in runs:
        for site, row, y, *each in zip(
            run["site"], run["row"], run["y"], *(run["said"][m] for m in (OURS, *ALONE)), strict=True
        ):
            of_row = held.setdefault(site, {}).setdefault(row, [y, []])
            of_row[1].append([_losses(np.array(said), y) for said in each])
    count = 0
    for rows in held.values():
        y = np.array([of_row[0] for of_row in rows.values()])
        # [rows, methods, classes]: the loss that a row would have had by its class; of numbers there is one
        ours_, *own = np.array([np.mean(of_row[1], axis=0) for of_row in rows.values()]).swapaxes(0, 1)
        at = np.arange(len(y)), y.astype(int) if ours_.shape[1] > 1 else np.zeros(len(y), dtype=int)
        best = min(own, key=lambda loss: float(loss[at].mean()))
        lost = ours_ - best
        if len(y) > 1 and lost[at].sum() > 0 and np.ptp(lost) > 0:
            count += by_chance(lost, at) < SURE
    return count / len(held)


def t_test(lost: Floats, at: tuple[Any, Any]) -> float:
    """One-sided paired t-test."""
    from scipy.stats import ttest_1samp  # type: ignore[import-untyped]

    with np.errstate(all="ignore"):
        p = float(ttest_1samp(lost[at], 0.0, alternative="greater").pvalue)
    return 1.0 if np.isnan(p) else p


def drawn_test(lost: Floats, at: tuple[Any, Any]) -> float:
    """How often outcomes drawn anew, from probabilities under which both are equally good, are as bad for fit."""
    if lost.shape[1] == 1:
        return t_test(lost, at)
    likely = equal_odds(lost)
    rng = np.random.default_rng(0)
    total = np.zeros(DRAWS)
    for row, p in zip(lost, likely, strict=True):
        total += row[rng.choice(len(p), size=DRAWS, p=p)]
    return float((1 + (total >= lost[at].sum() - 1e-9).sum()) / (1 + DRAWS))


def equal_odds(lost: Floats) -> Floats:
    """For each row probabilities of the classes under which the expected loss [rows, classes] is 0: uniform ones,
    tilted. Where one model is better whatever the class, the class for which that matters least is certain."""
    low, high = np.full(len(lost), -60.0), np.full(len(lost), 60.0)
    scale = np.abs(lost).max(1, keepdims=True) + 1e-300

    def tilted(tilt: Floats) -> Floats:
        z = tilt[:, None] * lost / scale
        p = np.exp(z - z.max(1, keepdims=True))
        return np.asarray(p / p.sum(1, keepdims=True))

    for _ in range(60):
        middle = (low + high) / 2
        is_above = (tilted(middle) * lost).sum(1) > 0
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    return tilted((low + high) / 2)
