"""Numbers and dates as people write them: $1,200, 45 %, 1,5, 9 Mar 2024, 20240109."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

_UNITS = r"^\s*([$€£¥])?\s*([+-]?)\s*([$€£¥])?\s*([\d.,\s']*\d)\s*([$€£¥%])?\s*$"  # before, sign, before, digits, after
_THOUSANDS = r"^\d{1,3}(?:,\d{3})+(?:\.\d+)?$"
_DECIMALS = r"^\d+,\d+$"
_THREE = r"^\d{1,3},\d{3}$"  # a thousand, or a number with three decimals
_PLAIN = r"^\d+(?:\.\d+)?$"
_COMPACT = r"^(?:19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])$"
_NAMED_MONTHS = ("%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y", "%d-%b-%Y", "%d-%b-%y")
MOST = 0.8  # share of values that must be written so; others are texts among numbers
FEWEST = 3  # numbers that must look like a date to be one


def first_of(text: pl.Series) -> str | None:
    """The first value. Where all must be of one form it tells most columns apart, at a thousandth of the cost."""
    return next((value for value in text if value is not None), None)


def amounts(text: pl.Series) -> tuple[pl.Series, str] | None:
    """Numbers with a currency, a percent sign or commas, and the unit; None if this column is not written so."""
    import polars as pl

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
    if (known.str.contains(_THOUSANDS) | known.str.contains(_PLAIN)).all():
        if not units[0] and known.filter(has_comma).str.contains(_THREE).all() and has_comma.any():
            return None  # in doubt: see `doubtful_number`
        plain = digits.str.replace_all(",", "")
    elif (known.str.contains(_DECIMALS) | known.str.contains(r"^\d+$")).all():
        plain = digits.str.replace(",", ".")
    else:
        return None
    sign = text.str.extract(_UNITS, 2).fill_null("")
    return (sign + plain).cast(pl.Float64, strict=False), units[0]


def doubtful_number(text: pl.Series) -> str | None:
    """A value such as 1,200 if every comma may be one of thousands or of decimals."""
    present = text.drop_nulls().str.strip_chars_start("+-")
    commas = present.filter(present.str.contains(",", literal=True))
    if not len(commas) or not commas.str.contains(_THREE).all() or not present.str.contains(r"^[\d.,]+$").all():
        return None
    return str(commas[0])


def named_days(text: pl.Series) -> pl.Series | None:
    """Days since 1970-01-01 of dates with the name of the month; None if some value is none."""
    import polars as pl

    first = first_of(text)
    if first is None or not re.search(r"[A-Za-z]{3}", first) or not re.search(r"\d", first):
        return None
    for form in _NAMED_MONTHS:
        days = text.str.to_date(form, strict=False)
        if days.null_count() == text.null_count():
            return days.cast(pl.Int32).cast(pl.Float64)
    return None


def compact_days(text: pl.Series, fewest: int = FEWEST) -> pl.Series | None:
    """Days since 1970-01-01 of numbers such as 20240109, if all of a few or more are days."""
    import polars as pl

    first = first_of(text)
    if first is None or not re.search(_COMPACT, first):
        return None
    present = text.drop_nulls()
    if len(present) < fewest or not present.str.contains(_COMPACT).all():
        return None
    days = text.str.to_date("%Y%m%d", strict=False)
    return days.cast(pl.Int32).cast(pl.Float64) if days.null_count() == text.null_count() else None


def is_compact(text: pl.Series) -> bool:
    """Whether all values are numbers of eight digits, which may have been taken for dates."""
    first = first_of(text)
    return first is not None and bool(re.search(r"^\d{8}$", first) and text.drop_nulls().str.contains(r"^\d{8}$").all())
