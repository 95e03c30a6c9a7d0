"""Which of several models serves a site, from validation samples alone, when a site has few of them.

A site's own estimate is noisy, so it is shrunk towards what the candidate gains at all sites (empirical Bayes: the gains
of sites are draws from a normal distribution, whose mean and spread are estimated by the moments of DerSimonian and
Laird). A candidate serves a site only if it is better than training alone by more than `caution` standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CAUTION = 1.5


@dataclass(frozen=True)
class Gain:
    """By how much a candidate is thought to be better than training alone, and how sure that is."""

    mean: float
    sd: float

    def surely(self, caution: float) -> float:
        """What is left after `caution` standard errors."""
        return self.mean - caution * self.sd


def gains(candidate: Sequence[Floats], alone: Sequence[Floats]) -> list[Gain]:
    """The gain at each site from scores of its validation samples (higher is better), the same samples for both."""
    apart = [np.asarray(c, float) - np.asarray(a, float) for c, a in zip(candidate, alone, strict=True)]
    there = [d for d in apart if len(d)]
    freedom = sum(len(d) - 1 for d in there)
    if not there:
        return [Gain(0.0, math.inf) for _ in apart]
    within = sum(float(((d - d.mean()) ** 2).sum()) for d in there) / max(freedom, 1)
    if freedom == 0:  # a single sample each tells nothing of its own spread
        within = float(np.var([d[0] for d in there])) or 1.0
    if within == 0:
        between = float(np.mean([d.mean() for d in there]))
        return [Gain(float(d.mean()) if len(d) else between, 0.0) for d in apart]
    means = np.array([d.mean() for d in there])
    noise = np.array([within / len(d) for d in there])  # variance of each mean
    spread = _spread(means, noise)
    weight = 1 / (noise + spread)
    center, doubt = float((weight * means).sum() / weight.sum()), float(1 / weight.sum())
    out = []
    for d in apart:
        if not len(d):
            out.append(Gain(center, math.sqrt(spread + doubt)))
            continue
        own = within / len(d)
        trust = spread / (spread + own)  # in what the site itself says
        mean = center + trust * (float(d.mean()) - center)
        out.append(Gain(mean, math.sqrt(trust * own + (1 - trust) ** 2 * doubt)))
    return out


def _spread(means: Floats, noise: Floats) -> float:
    """Variance of the true gains between sites, by moments."""
    weight = 1 / noise
    total = float(weight.sum())
    center = float((weight * means).sum() / total)
    excess = float((weight * (means - center) ** 2).sum()) - (len(means) - 1)
    scale = total - float((weight**2).sum()) / total
    return max(0.0, excess / scale) if scale > 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """What serves a site, and its estimated gain over training alone."""

    label: str
    gain: Gain


def choose(
    scores: Mapping[str, Sequence[Floats]], alone: str, caution: float = CAUTION
) -> tuple[list[Choice], dict[str, list[Gain]]]:
    """For each site the candidate that is surely best, or training alone; and all estimates.

    scores: by candidate, for each site one number per validation sample, higher is better.
    """
    found = {label: gains(per_site, scores[alone]) for label, per_site in scores.items() if label != alone}
    chosen = []
    for site in range(len(scores[alone])):
        best = max(found, key=lambda label: found[label][site].surely(caution), default=alone)
        sure = best != alone and found[best][site].surely(caution) > 0
        chosen.append(Choice(best, found[best][site]) if sure else Choice(alone, Gain(0.0, 0.0)))
    return chosen, found
