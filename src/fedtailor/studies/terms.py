"""The coefficients of a linear model as people read them: one per number, one per category against a usual one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData, Rows
from fedtailor.data.tabular.preparation import NumberColumn, Preparation

Floats = NDArray[np.float64]
INTERCEPT = "intercept"
ALIASED = 1e-6  # part of a contrast that the data does not show, from which on it is not estimable


@dataclass(frozen=True)
class Term:
    """A combination of coefficients that is shown."""

    name: str  # such as age, or arm=b
    column: str
    weights: Floats  # of the features, and of the intercept, which is last
    reference: str = ""  # the category that it is compared with
    sd: float | None = 1.0  # of the feature; None where sites have scales of their own
    varies: bool = True  # within some site; else its slope cannot differ between sites


def terms_of(data: FederatedData) -> list[Term]:
    """The intercept, at the mean of numbers and usual categories, and a term for every other coefficient.

    Categories are compared with the one that most training rows have: only differences are known of them.
    """
    prepared: Preparation = data.preparation
    size, counts = len(data.features) + 1, data.train.x.sum(0).numpy()
    varies = within(data.train)
    eye = np.eye(size)
    level, out, at = eye[-1].copy(), [], 0
    for column in prepared.columns:
        many = len(column.features)
        if isinstance(column, NumberColumn):
            spreads = {scale.sd for name, scale in column.sites.items() if name in data.clients}
            sd = spreads.pop() if len(spreads) == 1 else None
            out.append(Term(column.name, column.name, eye[at], sd=sd, varies=bool(varies[at])))
        elif column.statistic_names:
            some = range(at, at + many)
            out += [Term(data.features[j], column.name, eye[j], varies=bool(varies[j])) for j in some]
        else:
            usual = at + int(counts[at : at + many].argmax()) if many else at
            level += eye[usual] if many else 0.0
            for j in range(at, at + many):
                if j != usual:
                    name = column.features[j - at]
                    reference = column.categories[usual - at]
                    is_within = bool(varies[j] or varies[usual])
                    out.append(Term(name, column.name, eye[j] - eye[usual], reference, varies=is_within))
        at += many
    return [Term(INTERCEPT, INTERCEPT, level), *out]


def within(rows: Rows) -> NDArray[np.bool_]:
    """Features that are not constant within every site."""
    x, starts = rows.x, rows.starts.tolist()
    out = np.zeros(x.shape[1], dtype=bool)
    for a, b in pairwise(starts):
        if b > a:
            own = x[a:b]
            out |= (own != own[:1]).any(0).numpy()
    return out


def unseen(covariance: Floats) -> Floats:
    """The projection on what the data does not show: directions in which the covariance, a pseudo-inverse, is 0."""
    values, vectors = np.linalg.eigh(covariance)
    basis = vectors[:, values > 1e-13 * max(float(values[-1]), 1e-300)]
    hidden: Floats = np.eye(len(covariance)) - basis @ basis.T
    return hidden


def aliases(weights: Floats, hidden: Floats, features: tuple[str, ...]) -> list[str]:
    """Features with which a term that is not estimable goes together; nothing if it is estimable."""
    lost = hidden @ weights
    if lost @ lost <= ALIASED * (weights @ weights):
        return []
    own = {name for name, w in zip(features, weights, strict=False) if w}
    largest = np.abs(lost).max()
    return [name for name, v in zip(features, lost, strict=False) if abs(v) > 0.1 * largest and name not in own]
