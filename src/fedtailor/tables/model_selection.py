"""Which of several models serves a site, from validation samples alone, when a site has few of them.

A site's own estimate is noisy, so it is shrunk towards what the candidate gains at all sites (empirical Bayes: gains of
sites are draws from a normal distribution, whose mean and spread are estimated by the moments of DerSimonian and
Laird). A candidate serves a site only if its estimated gain over training alone is positive in the metric, and exceeds
some standard errors in the squared error of its probabilities (Brier score) or numbers, which needs fewer samples than
accuracy to separate models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm as normal  # type: ignore[import-untyped]
from scipy.stats import t as student

Floats = NDArray[np.float64]
CAUTION = {"metric": 0.0, "error": 2.0}
"""Standard errors by which a gain must be above zero, if there are many sites; with few it is more."""


ENOUGH, OUT_OF_PROPORTION, USUAL = 4, 10.0, 8.0
"""Degrees of freedom from which on a site's own variance is looked at, how often the usual one is too much, and how
many degrees the usual one is worth beside a site's own."""


@dataclass(frozen=True)
class Gain:
    """The estimated gain of a candidate over training alone, and its standard error."""

    mean: float
    sd: float

    def lower_bound(self, caution: float) -> float:
        """The mean less `caution` standard errors."""
        return self.mean - caution * self.sd


def gains(
    candidate: Sequence[Floats], alone: Sequence[Floats], is_bounded: bool = True, least: Sequence[float] | None = None
) -> list[Gain]:
    """The gain at each site from scores of its validation samples (higher is better), the same samples for both.

    `least` is the least variance of a sample's difference at each site, where more is known than its samples show.
    """
    differences = [
        _differences(np.asarray(c, float), np.asarray(a, float)) for c, a in zip(candidate, alone, strict=True)
    ]
    finite = [d for d in differences if len(d) and np.isfinite(d).all()]
    if not finite:
        return [_unbounded_gain(d) or Gain(0.0, math.inf) for d in differences]
    of_samples = _variances(finite, is_bounded)
    if least is not None:
        is_finite = [len(d) > 0 and bool(np.isfinite(d).all()) for d in differences]
        of_samples = np.maximum(of_samples, np.asarray(least, float)[is_finite])
    means = np.array([d.mean() for d in finite])
    if not of_samples.any():
        between = float(means.mean())
        return [_unbounded_gain(d) or Gain(float(d.mean()) if len(d) else between, 0.0) for d in differences]
    noise = of_samples / np.array([len(d) for d in finite])  # variance of each mean
    spread = _spread(means, noise)
    weight = 1 / (noise + spread)
    center, doubt = float((weight * means).sum() / weight.sum()), float(1 / weight.sum())
    own_noise = iter(noise)
    out = []
    for d in differences:
        if not len(d):
            out.append(Gain(center, math.sqrt(spread + doubt)))
        elif (endless := _unbounded_gain(d)) is not None:
            out.append(endless)
        else:
            own = float(next(own_noise))
            trust = spread / (spread + own)  # in the site's own estimate
            mean = center + trust * (float(d.mean()) - center)
            out.append(Gain(mean, math.sqrt(trust * own + (1 - trust) ** 2 * doubt)))
    return out


def chance(first: Floats, second: Floats) -> Floats:
    """For each row the variance of the difference of two log-likelihoods, from log-probabilities [rows, classes].

    It is the variance under the probabilities between the two for which neither is better.

    Samples alone do not show it: rows that are all of one class differ by nearly the same, however few they are.
    """
    apart, low, high = second - first, np.zeros((len(first), 1)), np.ones((len(first), 1))
    for _ in range(40):
        middle = (low + high) / 2
        p = _normalise(first + middle * apart)
        is_above = (p * apart).sum(1, keepdims=True) > 0
        low, high = np.where(is_above, low, middle), np.where(is_above, middle, high)
    return np.asarray((p * apart**2).sum(1) - (p * apart).sum(1) ** 2)


def _normalise(logs: Floats) -> Floats:
    p = np.exp(logs - logs.max(1, keepdims=True))
    return np.asarray(p / p.sum(1, keepdims=True))


def _differences(candidate: Floats, alone: Floats) -> Floats:
    """Differences of scores; NaN counts as the worst score."""
    candidate, alone = (np.where(np.isnan(v), -np.inf, v) for v in (candidate, alone))
    return np.subtract(candidate, alone, out=np.zeros(len(alone)), where=candidate != alone)


def _unbounded_gain(apart: Floats) -> Gain | None:
    """A site where one of the two fails altogether needs no estimate."""
    if np.isfinite(apart).all():
        return None
    return Gain(-math.inf if np.isneginf(apart).any() else math.inf, 0.0)


def _variances(differences: Sequence[Floats], is_bounded: bool) -> Floats:
    """Variance of the differences at each site: pooled, since few samples estimate it poorly.

    Unbounded scores: the site's own variance counts by its degrees of freedom, and outlying ones are not pooled.
    """
    freedom = np.array([len(d) - 1 for d in differences])
    if not freedom.any():  # one sample per site has no variance
        return np.full(len(differences), float(np.var([d[0] for d in differences])) or 1.0)
    squares = np.array([float(((d - d.mean()) ** 2).sum()) for d in differences])
    if is_bounded:
        return np.full(len(differences), squares.sum() / freedom.sum())
    own, known = squares / np.maximum(freedom, 1), freedom >= ENOUGH
    limit = OUT_OF_PROPORTION * float(np.median(own[known])) if known.any() else 0.0
    outlying = known & (own > limit) & (limit > 0)
    common = squares[~outlying].sum() / max(freedom[~outlying].sum(), 1)
    return np.where(outlying, own, (USUAL * common + squares) / (USUAL + freedom))


def _spread(means: Floats, noise: Floats) -> float:
    """Variance of the true gains between sites, by moments."""
    weight = 1 / noise
    total = float(weight.sum())
    center = float((weight * means).sum() / total)
    excess = float((weight * (means - center) ** 2).sum()) - (len(means) - 1)
    scale = total - float((weight**2).sum()) / total
    return max(0.0, excess / scale) if scale > 0 else 0.0


def required_errors(caution: float, sites: int) -> float:
    """The number of standard errors with the same tail probability under Student's t, for few sites."""
    if sites < 2:
        return caution  # there is no spread between sites
    return float(student.ppf(normal.cdf(caution), sites - 1))


@dataclass(frozen=True)
class ScoreView:
    """Scores of candidates: for each site one number per validation sample, higher is better."""

    scores: Mapping[str, Sequence[Floats]]  # by candidate
    caution: float
    is_bounded: bool = True  # scores have limits, as those of probabilities


def choose(views: Sequence[ScoreView], alone: str) -> tuple[list[str], list[dict[str, list[Gain]]]]:
    """For each site the best in the first view of the candidates that are better in all views, or training alone.

    Also returns the estimates, per view and candidate.
    """
    estimates = [
        {
            label: gains(per_site, view.scores[alone], view.is_bounded)
            for label, per_site in view.scores.items()
            if label != alone
        }
        for view in views
    ]
    chosen = []
    cautions = [required_errors(view.caution, sum(len(scores) > 0 for scores in view.scores[alone])) for view in views]
    for site in range(len(views[0].scores[alone])):
        sure = {
            label: [gain[label][site].lower_bound(caution) for caution, gain in zip(cautions, estimates, strict=True)]
            for label in estimates[0]
        }
        better = [label for label, margins in sure.items() if min(margins) > 0]
        chosen.append(max(better, key=lambda label: estimates[0][label][site].mean, default=alone))
    return chosen, estimates
