"""How the rows of a run were prepared, so that new rows are prepared in the same way. Saved with a run as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from fedtailor.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

MISSING = "missing"  # the category of values that are not there
OTHER = "other values"  # the category of rare texts, where there are very many
Floats = NDArray[np.float64]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Scale(_Plain):
    """How a site's numbers in one column are imputed, clipped and standardised: (x - mean) / sd."""

    median: float
    mean: float = 0.0
    sd: float = 1.0
    low: float | None = None  # values outside low..high are clipped: outliers would outweigh all others
    high: float | None = None
    missing: float = 0.0  # share of the site's training rows without a value

    def clip(self, values: Floats) -> Floats:
        return values if self.low is None or self.high is None else np.clip(values, self.low, self.high)


class NumberColumn(_Plain):
    """A column of numbers; dates are days since 1970-01-01."""

    kind: Literal["number"] = "number"
    name: str
    is_date: bool = False
    date_order: str = ""  # "day" or "month", where dates are written as 05/20/2024
    zero_is_missing: bool = False
    sites: dict[str, Scale]
    absent: tuple[str, ...] = ()  # sites that do not have the column

    @property
    def features(self) -> tuple[str, ...]:
        return (self.name,)


class CategoryColumn(_Plain):
    """A column of categories with a 0/1 feature each, or of very many, encoded by statistics of the target."""

    kind: Literal["category"] = "category"
    name: str
    categories: tuple[str, ...]
    absent: tuple[str, ...] = ()
    statistics: tuple[tuple[float, ...], ...] = ()  # of each category; unknown ones get 0
    statistic_names: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        return self.statistic_names or tuple(f"{self.name}={category}" for category in self.categories)

    @property
    def matrix(self) -> Floats:
        """Features of each category [categories, features]."""
        return np.array(self.statistics) if self.statistic_names else np.eye(len(self.categories))


class TargetColumn(_Plain):
    """What is predicted: a class, a count, or a number, which models see as (y - mean) / sd, perhaps of log y."""

    name: str
    task: Literal["classification", "regression", "count"]
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    sd: float = 1.0
    is_log: bool = False

    def standardise(self, y: Floats) -> NDArray[Any]:
        """Numbers or counts as models see them [rows, 1]."""
        if self.task == "count":
            return y.astype(np.int64)[:, None]
        return (((np.log(y) if self.is_log else y) - self.mean) / self.sd)[:, None]

    def readable(self, outputs: Tensor) -> Tensor:
        """Outputs in units of the target, or rates of counts; on the log scale they are medians."""
        if self.task == "count":
            return outputs.exp()
        numbers = outputs * self.sd + self.mean
        return numbers.exp() if self.is_log else numbers

    def true(self, y: Tensor) -> Tensor:
        """Targets that models see, in their own units."""
        return y.double() if self.task == "count" else self.readable(y)


class Preparation(_Plain):
    """How columns of a table become features, and how outputs become predictions."""

    columns: tuple[Annotated[NumberColumn | CategoryColumn, Field(discriminator="kind")], ...]
    target: TargetColumn

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for column in self.columns for name in column.features)

    @property
    def is_statistic(self) -> NDArray[np.bool_]:
        named = [
            (name, isinstance(c, CategoryColumn) and c.statistic_names) for c in self.columns for name in c.features
        ]
        return np.array([bool(names) for _, names in named], dtype=bool)

    @property
    def sites(self) -> frozenset[str]:
        """Sites whose rows can be prepared; empty if no column has scales."""
        return frozenset(name for c in self.columns if isinstance(c, NumberColumn) for name in c.sites)

    def of(self, site: str) -> Preparation:
        columns = tuple(
            c.model_copy(update={"sites": {site: c.sites[site]}}) if isinstance(c, NumberColumn) else c
            for c in self.columns
        )
        return self.model_copy(update={"columns": columns})

    def encode(
        self,
        site: str,
        numeric: Mapping[str, Floats],
        categorical: Mapping[str, Any],
        file: str,
        unknown: list[str] | None = None,
    ) -> Floats:
        """The feature matrix of a site's rows: numbers with NaN, categories with None where missing.

        An unknown category is an error or, if a list `unknown` for notes is given, encoded as none of the known ones.
        """
        blocks = []
        for column in self.columns:
            if isinstance(column, NumberColumn):
                scale, values = column.sites[site], numeric[column.name]
                gaps = np.isnan(values) | ((values == 0) if column.zero_is_missing else False)
                filled = np.where(gaps, scale.median, scale.clip(values))
                blocks.append(((filled - scale.mean) / scale.sd)[:, None])
            else:
                blocks.append(_features_of(column, categorical[column.name], file, unknown))
        return np.concatenate(blocks, axis=1)


def _features_of(column: CategoryColumn, values: Any, file: str, unknown: list[str] | None) -> Floats:
    import polars as pl

    labels = pl.Series(values, dtype=pl.String).fill_null(MISSING)
    at = labels.replace_strict(list(column.categories), list(range(len(column.categories))), default=-1).to_numpy()
    if (at < 0).any():  # perhaps in other capitals
        forms = {" ".join(name.casefold().split()): i for i, name in reversed(list(enumerate(column.categories)))}
        else_ = column.categories.index(OTHER) if OTHER in column.categories else -1
        again = [forms.get(" ".join(label.casefold().split()), else_) for label in labels.to_list()]
        at = np.where(at < 0, again, at)
    if (at < 0).any():
        first = labels[int(np.argmax(at < 0))]
        if unknown is None and not column.statistic_names:
            raise DataError(
                f'{file}: column "{column.name}" has the value "{first}", which no client of the run has; '
                f"known: {', '.join(column.categories)}"
            )
        (unknown if unknown is not None else []).append(
            f'{file}: column "{column.name}": {int((at < 0).sum())} rows have values such as "{first}", which no site '
            "of the run has; they count as none of the known ones"
        )
    if column.statistic_names:
        return np.concatenate([column.matrix, np.zeros((1, len(column.statistic_names)))])[at]
    return (at[:, None] == np.arange(len(column.categories))).astype(np.float64)
