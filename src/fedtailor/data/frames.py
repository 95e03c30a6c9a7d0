"""Frames of polars or pandas, or columns by name, as one kind of table; pandas itself is never imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedtailor.errors import DataError

if TYPE_CHECKING:
    import polars as pl


def as_frame(rows: Any, origin: str = "rows") -> pl.DataFrame:
    """A polars frame of whatever holds columns by name; `origin` names it in messages."""
    import polars as pl

    if isinstance(rows, pl.DataFrame):
        return rows
    if isinstance(rows, pl.LazyFrame):
        return rows.collect()
    if isinstance(rows, Mapping):
        return pl.DataFrame({str(name): _series(str(name), list(values)) for name, values in rows.items()})
    if hasattr(rows, "columns") and hasattr(rows, "iloc"):  # pandas
        names = [str(name) for name in rows.columns]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(f'{origin}: column "{repeated[0]}" appears more than once; rename or remove one')
        return pl.DataFrame([_of_pandas(name, rows.iloc[:, i]) for i, name in enumerate(names)])
    raise DataError(f"{origin}: is a {type(rows).__name__}; give a frame of polars or pandas, or columns by name")


def _of_pandas(name: str, series: Any) -> pl.Series:
    import polars as pl

    if getattr(series.dtype, "kind", "O") in "iufbM" and type(series.dtype).__module__.startswith("numpy"):
        return pl.Series(name, series.to_numpy())
    return _series(name, [None if gap else value for value, gap in zip(series.tolist(), series.isna(), strict=True)])


def _series(name: str, values: list[Any]) -> pl.Series:
    """Values of several kinds are read as text, as in a CSV file."""
    import polars as pl

    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        return pl.Series(name, [None if value is None else str(value) for value in values], dtype=pl.String)
    return pl.Series(name, values, strict=False)
