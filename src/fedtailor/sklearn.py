"""Estimators with the conventions of scikit-learn: rows of several sites in, a personal model for each.

Whose row it is says a column of the frame X (`client`), or `groups`; without either all rows are of one site. A row of
a site that was not there in `fit` is predicted by the model that all have in common.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_y, check_consistent_length, check_is_fitted, validate_data

from fedtailor.data.configs import FolderConfig
from fedtailor.data.tabular.prepare import prepare_tables
from fedtailor.data.tabular.read import as_frame, table_from_frame
from fedtailor.experiments.store import RunFolder
from fedtailor.tables.fit import fit as fitted
from fedtailor.tables.serve import Personal, personal

ONE = "all"  # the site of rows that name none
TARGET = "target of fit"


class _Personalized(BaseEstimator):
    """What both kinds have in common."""

    def __init__(
        self,
        client: str | None = None,
        algorithm: str = "auto",
        rounds: int = 32,
        validation: float = 0.2,
        settings: dict[str, Any] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.client = client
        self.algorithm = algorithm
        self.rounds = rounds
        self.validation = validation
        self.settings = settings
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # filled with the median of the site
        return tags

    def _fit(self, X: Any, y: NDArray[Any], groups: Any, task: str) -> None:
        frame, sites = self._rows(X, groups, reset=True)
        seed = int(check_random_state(self.random_state).randint(2**31))
        frame = frame.with_columns(pl.Series(TARGET, y))
        tables = {}
        for site in sorted(set(sites.tolist())):
            part = frame.filter(pl.Series(sites == site))
            if part.height == 1:
                raise ValueError(f'site "{site}" has n_samples=1, too few to train and to validate on')
            tables[site] = table_from_frame(Path(site), part)
        options: dict[str, Any] = {"test": 0.0, "val": self.validation, "task": task}
        with tempfile.TemporaryDirectory() as folder:
            config = FolderConfig(path=Path(folder) / "rows", target=TARGET, **options)
            loaded = prepare_tables(tables, config, seed)
            values = {"model.dtype": "float64", "checkpoint.seconds": 1e9} | dict(self.settings or {})
            record = fitted(
                {"source": "saved", "path": folder},
                Path(folder) / "fit",
                algorithm=self.algorithm,
                rounds=self.rounds,
                seed=seed,
                values=values,
                loaded=loaded,
            )
            self.models_ = {site: personal(Path(folder) / "fit", site) for site in loaded.clients}
            kind = "fedavg" if len(loaded.clients) > 1 else "local"
            common = Path(folder) / "fit" / record.get("common", f"{kind}-seed{seed}")
            self.common_ = personal(common, loaded.clients[0])
            self.n_iter_ = RunFolder(common).config.rounds
        self.served_ = {site: row["served"] for site, row in record["sites"].items()}

    def _rows(self, X: Any, groups: Any, reset: bool) -> tuple[pl.DataFrame, NDArray[Any]]:
        """Columns by name, and the site of every row."""
        if self.client is not None or _has_text(X):
            frame = as_frame(X, "X")
            if self.client is not None:
                if self.client not in frame.columns:
                    raise ValueError(f'X: no column "{self.client}", which names the site')
                groups = frame[self.client].cast(pl.String).to_numpy()
                frame = frame.drop(self.client)
            if reset:
                self.n_features_in_ = frame.width
                self.feature_names_in_ = np.array(frame.columns, dtype=object)
        else:
            numbers = validate_data(
                self, X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=1
            )
            names = [str(n) for n in getattr(self, "feature_names_in_", range(numbers.shape[1]))]
            frame = pl.DataFrame({name: numbers[:, i] for i, name in enumerate(names)})
        if not frame.height:
            words = f"Found array with 0 sample(s) (shape=(0, {frame.width})) while a minimum of 1 is required"
            raise ValueError(f"{words} by {type(self).__name__}.")
        if groups is None:
            return frame, np.full(frame.height, ONE, dtype=object)
        sites = np.array([str(group) for group in np.asarray(groups).ravel()], dtype=object)
        check_consistent_length(sites, frame)
        return frame, sites

    def _outputs(self, X: Any, groups: Any) -> NDArray[np.float64]:
        """Probabilities or numbers, every row by the model of its site."""
        check_is_fitted(self)
        frame, sites = self._rows(X, groups, reset=False)
        if len(self.models_) > 1 and groups is None and self.client is None:
            warnings.warn(
                f"no groups given: all {len(sites)} rows are predicted by the common model, none by its site's own",
                stacklevel=3,
            )
        only = next(iter(self.models_.values())) if len(self.models_) == 1 else self.common_
        out: NDArray[np.float64] | None = None
        for site in dict.fromkeys(sites.tolist()):
            at = sites == site
            values = _predictions(self.models_.get(site, only), frame.filter(pl.Series(at)))
            out = np.empty((len(sites), values.shape[1])) if out is None else out
            out[at] = values
        assert out is not None
        return out


def _predictions(model: Personal, rows: pl.DataFrame) -> NDArray[np.float64]:
    return model.readable(model.outputs(model.encode(table_from_frame(Path("X"), rows)))).numpy()


def _has_text(X: Any) -> bool:
    """Whether a frame has columns that are no numbers."""
    if isinstance(X, pl.DataFrame):
        return not all(kind.is_numeric() for kind in X.dtypes)
    dtypes = getattr(X, "dtypes", None)
    return (
        dtypes is not None and hasattr(X, "iloc") and any(getattr(kind, "kind", "O") not in "iufb" for kind in dtypes)
    )


class PersonalizedClassifier(ClassifierMixin, _Personalized):
    """A class for every row, by the model of its site."""

    def fit(self, X: Any, y: Any, groups: Any = None) -> PersonalizedClassifier:
        """Train the sites together, and give each the model that serves it best."""
        if y is None:
            raise ValueError("PersonalizedClassifier requires y to be passed, but the target y is None")
        check_consistent_length(X, y)
        self._rows(X, groups, reset=True)
        y = _check_y(y, estimator=self)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y: has one class only, {self.classes_[0]!r}; a classifier needs two")
        self._fit(X, codes, groups, "classification")
        return self

    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """The probability of each class, in the order of `classes_`."""
        return self._outputs(X, groups)

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """The most probable class."""
        likely = self._outputs(X, groups).argmax(1)
        return self.classes_[likely]


class PersonalizedRegressor(RegressorMixin, _Personalized):
    """A number for every row, by the model of its site."""

    def fit(self, X: Any, y: Any, groups: Any = None) -> PersonalizedRegressor:
        """Train the sites together, and give each the model that serves it best."""
        if y is None:
            raise ValueError("PersonalizedRegressor requires y to be passed, but the target y is None")
        check_consistent_length(X, y)
        y = _check_y(y, y_numeric=True, estimator=self)
        self._fit(X, y.astype(np.float64), groups, "regression")
        return self

    def predict(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """The number, in units of y."""
        return self._outputs(X, groups)[:, 0]


__all__ = ["PersonalizedClassifier", "PersonalizedRegressor"]
