"""What an analyst has: ridge or logistic regression and boosting at each site; mixed models and boosting, pooled.

Each takes the same training rows and returns for every test row a number, or the probability of each class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]


ATTEMPTS = 3  # of the mixed model of classes
FEW, MOST_LEVELS = 20, 50  # whole numbers that are classes; levels of a column that gets dummies


def _plain(column: pl.Series) -> pl.Series:
    """Dates as numbers; what is neither number nor text as text."""
    if column.dtype.is_temporal():
        return column.cast(pl.Int64)
    return column if column.dtype.is_numeric() or column.dtype == pl.String else column.cast(pl.String)


class Rows:
    """Training and test rows as numbers: dummies of categories, medians for gaps, scaled by all training rows."""

    def __init__(self, train: pl.DataFrame, test: pl.DataFrame, site: str, target: str) -> None:
        self.sites = [frame[site].to_numpy() for frame in (train, test)]
        is_text = train[target].dtype in (pl.String, pl.Boolean)
        few = not is_text and train[target].n_unique() <= FEW and bool((train[target].drop_nulls() % 1 == 0).all())
        self.is_class = is_text or few
        self.classes = sorted(train[target].unique().to_list()) if self.is_class else []
        self.y = [
            np.array([self.classes.index(v) for v in f[target]])
            if self.is_class
            else f[target].to_numpy().astype(float)
            for f in (train, test)
        ]
        blocks: list[tuple[Floats, Floats]] = []
        self.numeric: list[int] = []
        for name in train.columns:
            if name in (site, target):
                continue
            a, b = (_plain(frame[name]) for frame in (train, test))
            if a.null_count() == len(a):
                continue
            if a.dtype == pl.String:
                if a.n_unique() > MOST_LEVELS:  # names and numbers of persons
                    continue
                known = sorted(v for v in a.drop_nulls().unique().to_list())
                blocks += [
                    ((a == v).fill_null(False).to_numpy() * 1.0, (b == v).fill_null(False).to_numpy() * 1.0)
                    for v in known[1:]
                ]
                continue
            x, z = (v.cast(pl.Float64).to_numpy() for v in (a, b))
            middle = float(np.nanmedian(x))
            x, z = np.where(np.isnan(x), middle, x), np.where(np.isnan(z), middle, z)
            mean, sd = float(x.mean()), float(x.std()) or 1.0
            self.numeric.append(len(blocks))
            blocks.append(((x - mean) / sd, (z - mean) / sd))
        self.x = [np.column_stack([block[i] for block in blocks]) for i in (0, 1)]


def _per_site(rows: Rows, fitted: Callable[[Floats, Any], Callable[[Floats], Floats]]) -> Floats:
    out = np.full((len(rows.y[1]), max(len(rows.classes), 1)), np.nan)
    for name in np.unique(rows.sites[1]):
        a, b = rows.sites[0] == name, rows.sites[1] == name
        out[b] = fitted(rows.x[0][a], rows.y[0][a])(rows.x[1][b])
    return out


def _prior(y: NDArray[np.int64], classes: int) -> Floats:
    """Shares of the classes, with one row of each added."""
    count = np.bincount(y, minlength=classes) + 1.0
    return count / count.sum()


def _probabilities(model: Any, x: Floats, classes: int) -> Floats:
    out = np.full((len(x), classes), 1e-3)
    out[:, model.classes_] = np.clip(model.predict_proba(x), 1e-3, None)
    return out / out.sum(1, keepdims=True)


def mean(rows: Rows) -> Floats:
    """The site's mean, or its shares of the classes."""
    if rows.is_class:
        return _per_site(rows, lambda x, y: lambda z: np.tile(_prior(y, len(rows.classes)), (len(z), 1)))
    return _per_site(rows, lambda x, y: lambda z: np.full((len(z), 1), y.mean()))


def linear(rows: Rows) -> Floats:
    """RidgeCV or LogisticRegressionCV at each site."""
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV

    def ridge(x: Floats, y: Floats) -> Callable[[Floats], Floats]:
        if len(y) < 3:
            return lambda z: np.full((len(z), 1), y.mean())
        model = RidgeCV(alphas=np.logspace(-3, 4, 22)).fit(x, y)
        return lambda z: model.predict(z)[:, None]

    def logistic(x: Floats, y: NDArray[np.int64]) -> Callable[[Floats], Floats]:
        fewest = np.bincount(y)[np.unique(y)].min()
        prior = _prior(y, len(rows.classes))
        if len(np.unique(y)) < 2 or fewest < 2:
            return lambda z: np.tile(prior, (len(z), 1))
        folds = int(min(5, fewest))
        model = LogisticRegressionCV(Cs=10, cv=folds, scoring="neg_log_loss", max_iter=1000).fit(x, y)
        return lambda z: _probabilities(model, z, len(rows.classes))

    return _per_site(rows, logistic if rows.is_class else ridge)


def _boosting(is_class: bool, count: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor
    options = {"min_samples_leaf": 5, "max_leaf_nodes": 8, "learning_rate": 0.05} if count < 500 else {}
    return kind(random_state=0, early_stopping=count >= 500, **options)


def boosting(rows: Rows) -> Floats:
    """Boosted trees at each site."""

    def fitted(x: Floats, y: Any) -> Callable[[Floats], Floats]:
        if rows.is_class and len(np.unique(y)) < 2:
            return lambda z: np.tile(_prior(y, len(rows.classes)), (len(z), 1))
        if len(y) < 3:
            return lambda z: np.full((len(z), 1), y.mean())
        model = _boosting(rows.is_class, len(y)).fit(x, y)
        if rows.is_class:
            return lambda z: _probabilities(model, z, len(rows.classes))
        return lambda z: model.predict(z)[:, None]

    return _per_site(rows, fitted)


def pooled_boosting(rows: Rows) -> Floats:
    """Boosted trees on the rows of all sites, which see the site's mean of the target beside the features."""
    level = rows.y[0].astype(float)
    total = level.mean()
    means = {
        n: (level[rows.sites[0] == n].sum() + total) / ((rows.sites[0] == n).sum() + 1)
        for n in np.unique(rows.sites[0])
    }
    x, z = (np.column_stack([rows.x[i], [means.get(n, total) for n in rows.sites[i]]]) for i in (0, 1))
    model = _boosting(rows.is_class, 10**6).fit(x, rows.y[0])
    return _probabilities(model, z, len(rows.classes)) if rows.is_class else model.predict(z)[:, None]


def _design(rows: Rows) -> tuple[list[Floats], list[int]]:
    """Columns that are independent, with a constant, and those that may have a slope of their own at a site."""
    keep: list[int] = []
    base = np.ones((len(rows.x[0]), 1))
    for j in range(rows.x[0].shape[1]):
        tried = np.column_stack([base, rows.x[0][:, j]])
        if np.linalg.matrix_rank(tried) > base.shape[1]:
            base, keep = tried, [*keep, j]
    names = np.unique(rows.sites[0])
    slopes = [
        i + 1
        for i, j in enumerate(keep)
        if j in rows.numeric and any(np.ptp(rows.x[0][rows.sites[0] == n, j]) > 1e-9 for n in names)
    ]
    return [np.column_stack([np.ones(len(x)), x[:, keep]]) for x in rows.x], slopes[:3]


def mixed(rows: Rows, with_slopes: bool) -> Floats | None:
    """MixedLM, or BinomialBayesMixedGLM with random intercepts, on the rows of all sites."""
    (x, z), slopes = _design(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not rows.is_class:
            return _gaussian(rows, x, z, slopes if with_slopes else [])
        if len(rows.classes) != 2 or with_slopes:
            return None
        return _binomial(rows, x, z)


def _gaussian(rows: Rows, x: Floats, z: Floats, slopes: list[int]) -> Floats:
    from statsmodels.regression.mixed_linear_model import MixedLM

    effects = [0, *slopes]
    found = None
    for method in ("lbfgs", "powell"):
        try:
            found = MixedLM(rows.y[0], x, groups=rows.sites[0], exog_re=x[:, effects]).fit(method=[method], reml=True)
            if found.converged:
                break
        except np.linalg.LinAlgError:
            continue
    if found is None:
        return _gaussian(rows, x, z, []) if slopes else np.full((len(z), 1), rows.y[0].mean())
    out = z @ found.fe_params
    try:
        random = found.random_effects
    except (ValueError, np.linalg.LinAlgError):  # a covariance at the boundary
        return _gaussian(rows, x, z, []) if slopes else out[:, None]
    for i, name in enumerate(rows.sites[1]):
        if name in random:
            out[i] += z[i, effects] @ np.asarray(random[name])
    return out[:, None]


def _binomial(rows: Rows, x: Floats, z: Floats) -> Floats:
    from scipy import sparse  # type: ignore[import-untyped]
    from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

    names, at = np.unique(rows.sites[0], return_inverse=True)
    member = sparse.csr_matrix((np.ones(len(at)), (np.arange(len(at)), at)), shape=(len(at), len(names)))
    model = BinomialBayesMixedGLM(rows.y[0].astype(float), x, member, np.zeros(len(names), dtype=int), vcp_p=2, fe_p=3)
    tried = []
    for attempt in range(ATTEMPTS):  # it begins at random, and not every beginning leads to an end
        np.random.seed(attempt)  # noqa: NPY002
        found = model.fit_map()
        tried.append((float(model.logposterior(found.params)), attempt, found))
    found = max(fit for fit in tried if np.isfinite(fit[0]))[2]
    effect = dict(zip(names, found.vc_mean, strict=True))
    score = z @ found.fe_mean + np.array([effect.get(n, 0.0) for n in rows.sites[1]])
    p = 1 / (1 + np.exp(-score))
    return np.column_stack([1 - p, p])


BASELINES: dict[str, Callable[[Rows], Floats | None]] = {
    "site mean": mean,
    "linear alone": linear,
    "boosting alone": boosting,
    "mixed model, pooled": lambda rows: mixed(rows, with_slopes=False),
    "mixed model with slopes, pooled": lambda rows: mixed(rows, with_slopes=True),
    "boosting, pooled": pooled_boosting,
}
ALONE = ("linear alone", "boosting alone")
