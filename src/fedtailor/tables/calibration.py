"""Calibrated probabilities: a slope and, of two classes, an offset on the logits, shrunk towards those of all sites.

Estimated from out-of-fold outputs. Probabilities are left unchanged unless cross-validation shows that calibration
lowers the log loss by more than its uncertainty. But no site's are surer than its rows allow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PULLS = (
    math.inf,
    1000.0,
    300.0,
    100.0,
)  # rows that all sites' calibration is worth at one site; inf: nothing is its own
SURE = 2.0  # standard errors by which the log loss must be lower
STEPS = 8
FEWEST = 100  # rows
LARGEST = 40.0  # logit, without its sign
HALF = 0.5  # events, of Jeffreys' prior


@dataclass(frozen=True)
class ClassOutputs:
    """Log-probabilities of rows, and their classes."""

    logits: Floats
    y: NDArray[np.int64]
    site: NDArray[np.int64]

    @property
    def is_binary(self) -> bool:
        return self.logits.shape[1] == 2

    def only(self, at: NDArray[np.bool_]) -> ClassOutputs:
        return ClassOutputs(self.logits[at], self.y[at], self.site[at])

    def losses(self, theta: Floats) -> Floats:
        """Log loss of each row; theta [rows or 1, 2]: slope and offset."""
        log_probabilities = calibrate(self.logits, theta)
        return -log_probabilities[np.arange(len(log_probabilities)), self.y]

    def derivatives(self, theta: Floats) -> tuple[Floats, Floats]:
        """Gradient [rows, 2] and Hessian [rows, 2, 2] of each row's loss."""
        p = np.exp(calibrate(self.logits, theta))
        rest = p.copy()
        rest[np.arange(len(p)), self.y] -= 1
        shifts = np.zeros_like(self.logits)
        if self.is_binary:
            shifts[:, 1] = 1
        parts = np.stack([self.logits, shifts], axis=2)  # [rows, classes, 2]
        centered = parts - (p[:, :, None] * parts).sum(1, keepdims=True)
        curved = np.einsum("rk,rki,rkj->rij", p, centered, centered)
        return (rest[:, :, None] * parts).sum(1), curved


def calibrate(logits: Floats, theta: Floats) -> Floats:
    """Log-probabilities after a slope and, of the second of two classes, an offset."""
    z = logits * theta[:, :1]
    if logits.shape[1] == 2:
        z = z + theta[:, 1:] * np.array([[0.0, 1.0]])
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def fit_calibration(
    logits: Floats, y: NDArray[np.int64], site: NDArray[np.int64], folds: NDArray[np.int64], sites: int
) -> Floats:
    """[sites, 2], slope and offset of each; (1, 0) leaves probabilities as they are."""
    rows = ClassOutputs(np.maximum(logits, -LARGEST), y, site)
    return _with_floor(rows, _fit_calibration(rows, folds, sites))


def _fit_calibration(rows: ClassOutputs, folds: NDArray[np.int64], sites: int) -> Floats:
    y, site = rows.y, rows.site
    same = np.tile([1.0, 0.0], (sites, 1))
    if len(y) < FEWEST:
        return same
    before = rows.losses(same[site])
    held = {pull: before.copy() for pull in PULLS}
    for fold in np.unique(folds):
        at = folds == fold
        if at.all():
            return same
        rest, own = rows.only(~at), rows.only(at)
        common = _common(rest)
        for pull, losses in held.items():
            losses[at] = own.losses(_by_site(rest, common, sites, pull)[own.site])
    best = min(PULLS, key=lambda pull: float(held[pull].mean()))
    gain = before - held[best]
    if gain.mean() <= SURE * gain.std(ddof=1) / math.sqrt(len(gain)):
        return same
    return _by_site(rows, _common(rows), sites, best)


def _with_floor(rows: ClassOutputs, theta: Floats) -> Floats:
    """With offsets by which each of two classes is expected in half a row of a site, at least.

    By Jeffreys' rule 16 rows without an event allow no surer statement, whatever other sites have.
    """
    if not rows.is_binary:
        return theta
    theta, sites = theta.copy(), len(theta)
    count = np.bincount(rows.site, minlength=sites)
    for of_class, sign in ((1, 1.0), (0, -1.0)):

        def expected(offset: Floats, of_class: int = of_class) -> Floats:
            moved = theta + np.column_stack([np.zeros(sites), offset])
            p = np.exp(calibrate(rows.logits, moved[rows.site]))[:, of_class]
            return np.asarray(np.bincount(rows.site, p, sites), dtype=np.float64)

        low, high = np.zeros(sites), np.full(sites, 2 * LARGEST)
        is_low = (expected(low) < HALF) & (count > 1)
        if not is_low.any():
            continue
        for _ in range(60):
            middle = (low + high) / 2
            is_enough = expected(sign * middle) >= HALF
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        theta[:, 1] += sign * np.where(is_low, high, 0.0)
    return theta


def _common(rows: ClassOutputs) -> Floats:
    theta = np.array([1.0, 0.0])
    for _ in range(STEPS):
        gradient, curved = rows.derivatives(theta[None])
        step = np.linalg.solve(curved.sum(0) + np.eye(2), gradient.sum(0) + (theta - [1.0, 0.0]))
        theta = theta - np.clip(step, -0.5, 0.5)
    return np.array([max(theta[0], 0.05), theta[1]])


def _by_site(rows: ClassOutputs, common: Floats, sites: int, pull: float) -> Floats:
    theta = np.tile(common, (sites, 1))
    if math.isinf(pull):
        return theta
    for _ in range(STEPS):
        gradient, curved = rows.derivatives(theta[rows.site])
        metric = pull * curved.mean(0) + np.eye(2)
        total, summed = np.zeros((sites, 2, 2)), np.zeros((sites, 2))
        np.add.at(total, rows.site, curved)
        np.add.at(summed, rows.site, gradient)
        step = np.linalg.solve(total + metric, (summed + (theta - common) @ metric)[:, :, None])[:, :, 0]
        theta = theta - np.clip(step, -0.5, 0.5)
    theta[:, 0] = np.maximum(theta[:, 0], 0.05)
    return theta
