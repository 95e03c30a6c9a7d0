"""Columns of a table as text and, where possible, as numbers: $1,200, 45 %, 1,5, 9 Mar 2024, 20240109."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl

from fedtailor.errors import DataError

_MONEY = r"[$€£¥]|EUR|USD|GBP|CHF|JPY"
# before, sign, before, digits, after
_UNITS = rf"^\s*({_MONEY})?\s*([+-]?)\s*({_MONEY})?\s*([\d.,\s']*\d)\s*({_MONEY}|%)?\s*$"
_THOUSANDS = r"^\d{1,3}(?:,\d{3})+(?:\.\d+)?$"
_DECIMALS = r"^\d+,\d+$"
_EUROPEAN = r"^\d{1,3}(?:\.\d{3})+,\d+$"
_POINTS = r"^\d{1,3}(?:\.\d{3})+$"  # thousands, where another value is European
_THREE = r"^\d{1,3},\d{3}$"  # a thousand, or a number with three decimals
_PLAIN = r"^\d+(?:\.\d+)?$"
_COMPACT = r"^(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])$"
_NAMED_MONTHS = ("%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y", "%d-%b-%Y", "%d-%b-%y")
MOST = 0.8  # share of values that must be written so; others are texts among numbers
FEWEST = 3  # numbers that must look like a date to be one
MISSING_VALUES = ["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"]
_YEAR = r"^(?:19|20)\d{2}$"
_CLOCK = r"(?:[T ](\d{2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?$"
# dates whose parts cannot be mistaken, and which part is year, month and day
_DATES = {r"^(\d{4})[-/](\d{2})[-/](\d{2})" + _CLOCK: (1, 2, 3), r"^(\d{1,2})\.(\d{1,2})\.(\d{4})" + _CLOCK: (3, 2, 1)}
_DOUBTFUL_DATE = r"^(\d{1,2})[-/](\d{1,2})[-/](\d{2}|\d{4})\b"  # which of them is the day?
# digits that are a code: leading zeros, more digits than a float64 has, 12E4
_CODE = r"^(?:[+-]?0\d|[+-]?\d{16}|\d+[eE]\d)"


def first_value(text: pl.Series) -> str | None:
    """The first value. If all must have one form, it rules out most columns at a thousandth of the cost."""
    return next((value for value in text if value is not None), None)


def parse_amounts(text: pl.Series) -> tuple[pl.Series, str] | None:
    """Numbers of a column with a currency, a percent sign or commas, and the unit; None if it has none of them."""
    present = text.drop_nulls()
    fits = present.filter(present.str.contains(_UNITS))
    if len(fits) < MOST * len(present) or not len(fits) or fits.str.contains(r"^[+-]?\d+(\.\d+)?$").all():
        return None
    marks = {i: text.str.extract(_UNITS, i) for i in (1, 3, 5)}
    mark = marks[1].fill_null(marks[3]).fill_null(marks[5]).fill_null("")
    units = mark.filter(text.str.contains(_UNITS).fill_null(False)).unique().to_list()
    digits = text.str.extract(_UNITS, 4)
    known = digits.drop_nulls()
    has_comma = known.str.contains(",", literal=True)
    if len(units) > 1:  # such as 45 % beside 0.45
        return None
    if known.str.contains(_EUROPEAN).any():
        forms = (_EUROPEAN, _POINTS, _DECIMALS, r"^\d+$")
        if not known.str.contains("|".join(f"(?:{form})" for form in forms)).all():
            return None
        plain = digits.str.replace_all(".", "", literal=True).str.replace(",", ".")
    elif (known.str.contains(_THOUSANDS) | known.str.contains(_PLAIN)).all():
        if not units[0] and known.filter(has_comma).str.contains(_THREE).all() and has_comma.any():
            return None  # ambiguous: see `doubtful_number`
        plain = digits.str.replace_all(",", "")
    elif (known.str.contains(_DECIMALS) | known.str.contains(r"^\d+$")).all():
        plain = digits.str.replace(",", ".")
    else:
        return None
    sign = text.str.extract(_UNITS, 2).fill_null("")
    return (sign + plain).cast(pl.Float64, strict=False), units[0]


def doubtful_number(text: pl.Series) -> str | None:
    """A value such as 1,200 if every comma may separate thousands or decimals."""
    present = text.drop_nulls().str.strip_chars_start("+-")
    commas = present.filter(present.str.contains(",", literal=True))
    if not len(commas) or not commas.str.contains(_THREE).all() or not present.str.contains(r"^[\d.,]+$").all():
        return None
    return str(commas[0])


def parse_named_days(text: pl.Series) -> pl.Series | None:
    """Days since 1970-01-01 of dates with the name of the month; None if some value is not one."""
    first = first_value(text)
    if first is None or not re.search(r"[A-Za-z]{3}", first) or not re.search(r"\d", first):
        return None
    for form in _NAMED_MONTHS:
        days = text.str.to_date(form, strict=False)
        if days.null_count() == text.null_count():
            return days.cast(pl.Int32).cast(pl.Float64)
    return None


def parse_compact_days(text: pl.Series, fewest: int = FEWEST) -> pl.Series | None:
    """Days since 1970-01-01 of numbers such as 20240109, if all of at least `fewest` are dates."""
    first = first_value(text)
    if first is None or not re.search(_COMPACT, first):
        return None
    present = text.drop_nulls()
    if len(present) < fewest or not present.str.contains(_COMPACT).all():
        return None
    days = text.str.to_date("%Y%m%d", strict=False)
    return days.cast(pl.Int32).cast(pl.Float64) if days.null_count() == text.null_count() else None


def is_compact(text: pl.Series) -> bool:
    """Whether all values have eight digits, and may have been read as dates."""
    first = first_value(text)
    return first is not None and bool(re.search(r"^\d{8}$", first) and text.drop_nulls().str.contains(r"^\d{8}$").all())


@dataclass(frozen=True)
class Column:
    """Values of one column as text (null: missing) and as finite numbers (null: missing or not a number)."""

    text: pl.Series
    number: pl.Series
    is_date: bool = False  # numbers are days since 1970-01-01
    unit: str = ""  # a currency or %, where values are written with one

    @cached_property
    def is_text(self) -> pl.Series:
        """Where there is a value that is not a number."""
        return self.number.is_null() & self.text.is_not_null()

    @property
    def doubtful_date(self) -> str | None:
        """A value, if all look like dates whose day and month cannot be told apart."""
        first = first_value(self.text)
        if self.is_date or first is None or not re.search(_DOUBTFUL_DATE, first):
            return None
        return first if self.text.drop_nulls().str.contains(_DOUBTFUL_DATE).all() else None

    @property
    def doubtful_number(self) -> str | None:
        """A value such as 1,200, if its comma may separate thousands or decimals."""
        return doubtful_number(self.text) if self.is_text.any() else None

    @property
    def bare_year(self) -> int | None:
        """The first row with a year alone, where all other values are whole dates."""
        if self.is_date or not self.is_text.any():
            return None
        is_year = self.text.str.contains(_YEAR).fill_null(False)
        rest = self.text.filter(~is_year)
        return int(is_year.arg_max() or 0) if is_year.any() and parse_days(rest) is not None else None

    @property
    def date_order(self) -> str:
        """Which part comes first, where a doubtful date shows it: 20 is no month; "both" if some show each."""
        if self.doubtful_date is None:
            return ""
        is_first, is_second = (
            bool((self.text.str.extract(_DOUBTFUL_DATE, i).cast(pl.Int64, strict=False) > 12).any()) for i in (1, 2)
        )
        return "both" if is_first and is_second else "day" if is_first else "month" if is_second else ""

    def in_order(self, order: str) -> Column:
        """Doubtful dates as days, where it is known which part comes first."""
        if not order or self.doubtful_date is None:
            return self
        parts = [self.text.str.extract(_DOUBTFUL_DATE, i) for i in (1, 2, 3)]
        day, month = (parts[0], parts[1]) if order == "day" else (parts[1], parts[0])
        year = parts[2].str.len_chars().eq(2).fill_null(False)
        whole = parts[2].zip_with(~year, "20" + parts[2])
        days = (whole + "-" + month.str.zfill(2) + "-" + day.str.zfill(2)).str.to_date("%Y-%m-%d", strict=False)
        if days.null_count() > self.text.null_count():
            return self
        return Column(self.text, days.cast(pl.Int32).cast(pl.Float64), is_date=True)

    def of_kind(self, is_date: bool) -> Column:
        """The column with numbers of eight digits as dates or as plain numbers; other columns are unchanged."""
        if self.is_date == is_date or not is_compact(self.text):
            return self
        if not is_date:
            return Column(self.text, self.text.cast(pl.Float64, strict=False))
        days = parse_compact_days(self.text, fewest=1)
        return self if days is None else Column(self.text, days, is_date=True)

    def labels(self) -> pl.Series:
        """Values as category names; 1 and 1.0 have the same name."""
        distinct = self.number.drop_nulls().unique().to_list()
        if self.is_date or not distinct:
            return self.text
        names = [_format_number(value) for value in distinct]
        named = self.number.replace_strict(distinct, names, return_dtype=pl.String, default=None)
        return named.fill_null(self.text)

    def names(self) -> pl.Series:
        """Values as names of sites and classes; codes such as 007 are kept as they are."""
        return self.labels().zip_with(~self.text.str.contains(_CODE).fill_null(False), self.text)


@dataclass(frozen=True)
class ClientTable:
    path: Path
    names: tuple[str, ...]  # including ignored columns
    columns: dict[str, Column]
    rows: int
    numbers: pl.Series | None = None  # of the rows in their file, where that has the rows of others too
    notes: tuple[str, ...] = ()  # on how the file was read

    def place(self, row: int) -> str:
        """Where a row stands in its file."""
        return f"data row {row + 1 if self.numbers is None else self.numbers[row] + 1}"

    def in_order(self, orders: Mapping[str, str]) -> ClientTable:
        """With doubtful dates as days, by column."""
        known = {name: c.in_order(orders[name]) for name, c in self.columns.items() if orders.get(name)}
        return replace(self, columns=self.columns | known) if known else self

    def only(self, keep: pl.Series) -> ClientTable:
        return self.rows_at(keep.arg_true().to_list())

    def rows_at(self, rows: list[int]) -> ClientTable:
        """Some rows, by number."""
        at = pl.Series(rows, dtype=pl.UInt32)
        columns = {
            name: replace(column, text=column.text.gather(at), number=column.number.gather(at))
            for name, column in self.columns.items()
        }
        numbers = at if self.numbers is None else self.numbers.gather(at)
        return ClientTable(self.path, self.names, columns, len(rows), numbers, self.notes)


def column_from_series(path: Path, series: pl.Series) -> Column:
    kind = series.dtype
    if kind == pl.Boolean or isinstance(kind, pl.Categorical | pl.Enum) or kind == pl.Null:
        series = series.cast(pl.String)
    if series.dtype == pl.String:
        text = series.str.strip_chars()
        text = text.set(text.is_in(MISSING_VALUES), None)
        if (days := parse_days(text)) is not None:
            return Column(text, days, is_date=True)
        number = text.cast(pl.Float64, strict=False)
        if number.null_count() > text.null_count() and (amount := parse_amounts(text)) is not None:
            return Column(text, amount[0], unit=amount[1])
    elif kind.is_numeric():
        if kind.is_float() and np.isnan(series.to_numpy()).any():
            series = series.fill_nan(None)
        text, number = series.cast(pl.String), series.cast(pl.Float64)
        if kind.is_integer() and (days := parse_compact_days(text)) is not None:
            return Column(text, days, is_date=True)
    elif kind == pl.Date or isinstance(kind, pl.Datetime):
        return Column(series.cast(pl.String), series.cast(pl.Datetime("us")).dt.epoch("us") / 86_400e6, is_date=True)
    else:
        raise DataError(
            f'{path}: column "{series.name}" has the type {kind}, neither numbers nor text nor dates; '
            f"leave it out with data.ignore = ['{series.name}']"
        )
    if not np.isfinite(number.to_numpy()).all():  # of a single row, expressions of polars would take longest
        number = number.set(~number.is_finite(), None)
    return Column(text, number)


def parse_days(text: pl.Series) -> pl.Series | None:
    """Days since 1970-01-01 if all values are written as dates; null where there is no such day."""
    first = first_value(text)
    if first is None:
        return None
    for pattern, (year, month, day) in _DATES.items():
        if re.search(pattern, first) and text.drop_nulls().str.contains(pattern).all():
            parts = [text.str.extract(pattern, i).str.zfill(2) for i in (year, month, day)]
            clock = [text.str.extract(pattern, i).fill_null("00") for i in (4, 5, 6)]
            written = parts[0] + "-" + parts[1] + "-" + parts[2] + " " + clock[0] + ":" + clock[1] + ":" + clock[2]
            return written.str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False).dt.epoch("s").cast(pl.Float64) / 86_400
    return days if (days := parse_named_days(text)) is not None else parse_compact_days(text)


def _format_number(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)
