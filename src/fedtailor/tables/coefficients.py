"""Coefficients of the linear part of a fit, common and by site, with confidence intervals, from the mixed model.

The server's covariance consists of sums over sites. That of a site's own coefficients needs its X'X, and is computed
where that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.trees import Tree
from fedtailor.data.tabular.preparation import NumberColumn, Preparation
from fedtailor.errors import ConfigError
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import RunFolder
from fedtailor.numerics.reml import own_covariance
from fedtailor.studies.grid import Cell
from fedtailor.tables.candidates import (
    ALONE,
    COMMON,
    LinearModels,
    all_in_training,
    delivered_models,
    kind_of,
    train,
    train_sites,
)
from fedtailor.tables.variance_tests import LEVEL, difference_tests, problem_of

Floats = NDArray[np.float64]
INTERCEPT = "intercept"
ALIASED = 1e-6  # unidentified share of a contrast above which it is not estimable


@dataclass(frozen=True)
class CoefficientTerm:
    """A linear combination of coefficients that is reported."""

    name: str  # such as age, or arm=b
    column: str
    weights: Floats  # of the features, and of the intercept, which is last
    reference: str = ""  # the category that it is compared with
    sd: float | None = 1.0  # of the feature; None where sites have scales of their own
    varies: bool = True  # within some site; else its slope cannot differ between sites


def terms_of(data: FederatedData) -> list[CoefficientTerm]:
    """The intercept, at the mean of numbers and usual categories, and a term for every other coefficient.

    Categories are compared with the most frequent one in training: only differences are identifiable.
    """
    prepared: Preparation = data.preparation
    size, counts = len(data.features) + 1, data.train.x.sum(0).numpy()
    varies = varies_within_sites(data.train)
    eye = np.eye(size)
    level, out, at = eye[-1].copy(), [], 0
    for column in prepared.columns:
        many = len(column.features)
        if isinstance(column, NumberColumn):
            spreads = {scale.sd for name, scale in column.sites.items() if name in data.clients}
            sd = spreads.pop() if len(spreads) == 1 else None
            out.append(CoefficientTerm(column.name, column.name, eye[at], sd=sd, varies=bool(varies[at])))
        elif column.statistic_names:
            some = range(at, at + many)
            out += [CoefficientTerm(data.features[j], column.name, eye[j], varies=bool(varies[j])) for j in some]
        else:
            usual = at + int(counts[at : at + many].argmax()) if many else at
            level += eye[usual] if many else 0.0
            for j in range(at, at + many):
                if j != usual:
                    name = column.features[j - at]
                    reference = column.categories[usual - at]
                    is_within = bool(varies[j] or varies[usual])
                    out.append(CoefficientTerm(name, column.name, eye[j] - eye[usual], reference, varies=is_within))
        at += many
    return [CoefficientTerm(INTERCEPT, INTERCEPT, level), *out]


def varies_within_sites(rows: Rows) -> NDArray[np.bool_]:
    """Features that are not constant within every site."""
    x, starts = rows.x, rows.starts.tolist()
    out = np.zeros(x.shape[1], dtype=bool)
    for a, b in pairwise(starts):
        if b > a:
            own = x[a:b]
            out |= (own != own[:1]).any(0).numpy()
    return out


def null_projection(covariance: Floats) -> Floats:
    """The projection on directions that the data does not identify: where the covariance, a pseudo-inverse, is 0."""
    values, vectors = np.linalg.eigh(covariance)
    basis = vectors[:, values > 1e-13 * max(float(values[-1]), 1e-300)]
    hidden: Floats = np.eye(len(covariance)) - basis @ basis.T
    return hidden


def aliases(weights: Floats, hidden: Floats, features: tuple[str, ...]) -> list[str]:
    """Features that a term is aliased with; none if it is estimable."""
    lost = hidden @ weights
    if lost @ lost <= ALIASED * (weights @ weights):
        return []
    own = {name for name, w in zip(features, weights, strict=False) if w}
    largest = np.abs(lost).max()
    return [name for name, v in zip(features, lost, strict=False) if abs(v) > 0.1 * largest and name not in own]


Z = 1.959964  # 95 %
AT_ONCE = 2**22  # numbers in the covariances of sites that are computed together


@dataclass(frozen=True)
class MixedFit:
    """A mixed model as it was fitted, of standardised features."""

    server: Tree  # beta, factor, covariance, noise
    curvatures: Tensor  # [sites, k, k], X'X of each site
    own: Floats  # [sites, k], coefficients of each site
    moments: tuple[Tensor, Tensor, Tensor] | None = None  # X'y and y'y of each site, and numbers in y
    penalty: float = 0.0

    @property
    def noise(self) -> float:
        return float(self.server.get("noise", 1.0))

    @property
    def spread(self) -> Floats:
        """Covariance of the coefficients between sites."""
        factor = self.server["factor"].double().numpy()
        spread: Floats = self.noise * factor @ factor.T
        return spread


def representative_model(cells: list[Cell], weights: Floats) -> Cell | None:
    """The mixed model with most weight, or the common model where that has most."""
    total = dict(zip((cell.label for cell in cells), weights.sum(0).tolist(), strict=True))
    mixed = [cell for cell in cells if cell.label not in (ALONE, COMMON)]
    common = next((cell for cell in cells if cell.label == COMMON), None)
    if common is not None and (not mixed or total[COMMON] > len(weights) / 2):
        return common
    return max(reversed(mixed), key=lambda cell: total[cell.label], default=None)


def load_mixed_fit(cell: Cell, data: FederatedData) -> MixedFit:
    """Read a mixed model from its run."""
    saved = RunFolder(cell.folder).load_checkpoint()
    assert saved is not None
    state = saved[1]["state"]
    return _as_mixed_fit(cell, data, state["server"], state["clients"]["state"], delivered_models(cell, data.clients))


def fit_every_row(cell: Cell, data: FederatedData) -> MixedFit:
    """The same mixed model fitted to all rows in `data`, from where its run ended."""
    saved = RunFolder(cell.folder).load_checkpoint()
    assert saved is not None
    return _as_mixed_fit(cell, data, *train_sites(cell.config, data, saved[1]["state"]["server"]))


def _as_mixed_fit(cell: Cell, data: FederatedData, server: Tree, sites: Tree, models: LinearModels) -> MixedFit:
    algorithm = algorithms.make(cell.config.algorithm.name, cell.config.algorithm.options)
    moments = sites["b"].double(), sites["c"].double(), sites.get("count", data.train.sizes).double()
    own, penalty = coefficient_vectors(models, data), float(getattr(algorithm, "penalty", 0.0))
    return MixedFit(server, sites["a"].double(), own, moments, penalty)


def fit_one_site(config: RunConfig, data: FederatedData) -> MixedFit:
    """The ordinary, unpenalised model of a single site."""
    name = kind_of(data.task)
    own = parse(config.plain() | {"algorithm": {"name": name, "effects": "none"}}, origin="fit")
    server, models = train(own, data)
    k = len(server["beta"])
    return MixedFit(
        server, torch.zeros((1, k, k), dtype=torch.float64, device="cpu"), coefficient_vectors(models, data)
    )


def coefficient_vectors(models: LinearModels, data: FederatedData) -> Floats:
    """Linear models as vectors [sites, k]: by class against the first, its features and then its intercept."""
    rows = torch.cat([models.weight, models.bias[:, :, None]], dim=2)
    is_class = data.task == "classification"
    vectors: Floats = (rows[:, 1:] - rows[:, :1] if is_class else rows).flatten(1).numpy()
    return vectors


def coefficient_record(mixed: MixedFit, data: FederatedData, label: str) -> dict[str, Any]:
    """As effects.json has them; values are per standard deviation of a number, in units of the target or log-odds."""
    is_class = data.task == "classification"
    target = data.preparation.target
    unit = 1.0 if is_class else float(target.sd)
    terms, names = terms_of(data), data.classes or tuple(map(str, range(data.outputs)))
    beta, covariance = mixed.server["beta"].double().reshape(-1).numpy(), mixed.server["covariance"].double()
    hidden, spread = null_projection(covariance.numpy()), mixed.spread
    size = len(terms[0].weights)
    p_values = tests_by_column(mixed, terms, size)
    weights = np.zeros((len(beta) // size, len(terms), len(beta)))
    for j in range(len(beta) // size):
        weights[j, :, j * size : (j + 1) * size] = [term.weights for term in terms]
    own_errors, shares = _own_errors(mixed, weights.reshape(-1, len(beta)))
    own_errors = own_errors.reshape(len(own_errors), *weights.shape[:2])
    outputs = []
    for j in range(len(beta) // size):
        rows = []
        for t, term in enumerate(terms):
            w = weights[j, t]
            alias = sorted(set(aliases(w, hidden, (*data.features, INTERCEPT) * (len(beta) // size))))
            values, middle = unit * (mixed.own @ w), 0.0 if is_class or term.name != INTERCEPT else target.mean
            errors = own_errors[:, j, t].tolist()
            ends = [
                _confidence_interval(middle + v, unit * e, alias) for v, e in zip(values.tolist(), errors, strict=True)
            ]
            signs = {end["low"] > 0 for end in ends if not alias and end["low"] * end["high"] > 0}  # type: ignore[operator]
            rows.append(
                _term_record(term)
                | {
                    "aliases": alias,
                    **_confidence_interval(
                        middle + unit * (beta @ w), unit * _standard_error(covariance.numpy(), w), alias
                    ),
                    "spread": unit * _standard_error(spread, w),
                    "differs": p_values[term.column] < LEVEL,
                    "differs_p": p_values[term.column],
                    "crosses": len(signs) > 1,
                    "share": float(shares[:, np.flatnonzero(w)].mean()),
                    "sites": ends,
                }
            )
        outputs.append(
            {"class": names[j + 1] if is_class else "", "against": names[0] if is_class else "", "terms": rows}
        )
    of_numbers = f"log of {target.name}" if target.is_log or data.task == "count" else target.name
    scale = "log-odds" if is_class else of_numbers
    return {"model": label, "scale": scale, "sites": list(data.clients), "outputs": outputs}


def _own_errors(mixed: MixedFit, weights: Floats) -> tuple[Floats, Floats]:
    """Standard errors of combinations of each site's coefficients [sites, combinations], and the share of the common
    coefficient in each [sites, k]."""
    factor, covariance = mixed.server["factor"].double(), mixed.server["covariance"].double()
    w, errors, shares = torch.from_numpy(weights), [], []
    together = max(1, AT_ONCE // len(covariance) ** 2)
    for a in range(0, len(mixed.curvatures), together):
        own, kept = own_covariance(mixed.curvatures[a : a + together], factor, covariance, mixed.noise)
        errors.append(((w @ own) * w).sum(-1).clamp(min=0).sqrt())
        shares.append(kept.clamp(0, 1))
    return torch.cat(errors).numpy(), torch.cat(shares).numpy()


def tests_by_column(mixed: MixedFit, terms: list[CoefficientTerm], size: int) -> dict[str, float]:
    """P-values of a column's effect differing between sites."""
    if mixed.moments is None:
        return {term.column: 1.0 for term in terms}
    outputs = range(len(mixed.server["beta"].reshape(-1)) // size)
    features: dict[str, set[int]] = {}
    for term in terms:
        used = np.flatnonzero(term.weights[:-1]) if term.name != INTERCEPT else np.array([size - 1])
        features.setdefault(term.column, set()).update(int(j) for j in used)
    # a site's level may be in the effects of its categories, which add up to an intercept
    features[INTERCEPT] |= {int(j) for term in terms if term.reference for j in np.flatnonzero(term.weights[:-1])}
    places = {name: [o * size + j for o in outputs for j in sorted(js)] for name, js in features.items()}
    is_known = "noise" not in mixed.server  # of a working response
    like = mixed.server["factor"].double()
    penalty = torch.full_like(like[0], mixed.penalty)
    penalty[size - 1 :: size] = 1e-6 if is_known else 0.0
    problem = problem_of(mixed.curvatures, *mixed.moments, penalty, 1.0 if is_known else None)
    return difference_tests(problem, like, places)


def _standard_error(covariance: Floats, weights: Floats) -> float:
    return float(np.sqrt(max(float(weights @ covariance @ weights), 0.0)))


def _term_record(term: CoefficientTerm) -> dict[str, Any]:
    return {
        "name": term.name,
        "column": term.column,
        "reference": term.reference,
        "sd": term.sd,
        "varies": term.varies,
    }


def _confidence_interval(value: float, error: float, alias: list[str]) -> dict[str, float | None]:
    """None for a term that is not identifiable."""
    if alias:
        return {"value": None, "low": None, "high": None}
    return {"value": float(value), "low": float(value - Z * error), "high": float(value + Z * error)}


def fit_coefficients(cells: list[Cell], weights: Floats, data: FederatedData, label: str = "") -> dict[str, Any] | None:
    """Coefficients of the model that is asked for, or of the representative one, fitted to all rows, those for testing
    too: they describe, and predict nothing. And its weight in what serves the sites."""
    every = all_in_training(data, test=True)
    rows = {"rows": int(every.train.sizes.sum()), "asked": bool(label)}
    if len(every.clients) == 1:
        return coefficient_record(fit_one_site(cells[0].config, every), every, ALONE) | {"weight": 1.0} | rows
    cell = _asked_for(cells, label) if label else representative_model(cells, weights)
    if cell is None:
        return None
    part = float(weights[:, cells.index(cell)].mean())
    return coefficient_record(fit_every_row(cell, every), every, cell.label) | {"weight": part} | rows


def _asked_for(cells: list[Cell], label: str) -> Cell:
    known = {cell.label: cell for cell in cells if cell.label != ALONE}
    if label not in known:
        raise ConfigError(f'--model "{label}": no such model; known: {"; ".join(known)}')
    return known[label]
