"""Read one CSV or Parquet file into columns that are known both as text and, where possible, as numbers."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.data.files import read_bytes
from fedtailor.data.parquet_check import check as check_parquet
from fedtailor.data.written_forms import amounts, compact_days, doubtful_number, first_of, is_compact, named_days
from fedtailor.errors import DataError, nearest

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")
MISSING_VALUES = ["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"]
# files with ";" between columns often have "," in numbers
_DECIMAL_COMMA = r"^\s*([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)\s*$"
_CLOCK = r"(?:[T ](\d{2}):(\d{2})(?::(\d{2})(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?$"
# dates whose parts cannot be mistaken, and which part is year, month and day
_DATES = {r"^(\d{4})[-/](\d{2})[-/](\d{2})" + _CLOCK: (1, 2, 3), r"^(\d{1,2})\.(\d{1,2})\.(\d{4})" + _CLOCK: (3, 2, 1)}
_DOUBTFUL_DATE = r"^\d{1,2}[-/]\d{1,2}[-/]\d{2,4}\b"  # which of them is the day?
# digits that are a name: leading zeros, more of them than a number can hold, 12E4
_CODE = r"^(?:[+-]?0\d|[+-]?\d{16}|\d+[eE]\d)"
SEPARATORS = ",;\t|"


@dataclass(frozen=True)
class Column:
    """Values of one column as text (null: missing) and as finite numbers (null: missing or not a number)."""

    text: pl.Series
    number: pl.Series
    is_date: bool = False  # numbers are days since 1970-01-01
    unit: str = ""  # a currency or %, where values are written with one

    @property
    def is_text(self) -> pl.Series:
        """Where there is a value that is not a number."""
        return self.number.is_null() & self.text.is_not_null()

    @property
    def doubtful_date(self) -> str | None:
        """A value, if all look like dates that may be day/month or month/day."""
        first = first_of(self.text)
        if first is None or not re.search(_DOUBTFUL_DATE, first):
            return None
        return first if self.text.drop_nulls().str.contains(_DOUBTFUL_DATE).all() else None

    @property
    def doubtful_number(self) -> str | None:
        """A value such as 1,200, if the comma may be one of thousands or of decimals."""
        return doubtful_number(self.text) if self.is_text.any() else None

    def of_kind(self, is_date: bool) -> Column:
        """Numbers of eight digits as dates or as plain numbers, whichever is wanted; others as they are."""
        import polars as pl

        if self.is_date == is_date or not is_compact(self.text):
            return self
        if not is_date:
            return Column(self.text, self.text.cast(pl.Float64, strict=False))
        days = compact_days(self.text, fewest=1)
        return self if days is None else Column(self.text, days, is_date=True)

    def labels(self) -> pl.Series:
        """Values as category names; whole numbers are written alike however the file writes them (1, 1.0)."""
        import polars as pl

        distinct = self.number.drop_nulls().unique().to_list()
        if self.is_date or not distinct:
            return self.text
        names = [_number_name(value) for value in distinct]
        named = self.number.replace_strict(distinct, names, return_dtype=pl.String, default=None)
        return named.fill_null(self.text)

    def names(self) -> pl.Series:
        """Labels of sites and classes: codes such as 007 are kept as they are written."""
        return self.labels().zip_with(~self.text.str.contains(_CODE).fill_null(False), self.text)


@dataclass(frozen=True)
class Table:
    """One file."""

    path: Path
    names: tuple[str, ...]  # of all columns, also the ignored ones
    columns: dict[str, Column]
    rows: int

    def only(self, keep: pl.Series) -> Table:
        """Some of its rows."""
        columns = {
            name: replace(column, text=column.text.filter(keep), number=column.number.filter(keep))
            for name, column in self.columns.items()
        }
        return Table(self.path, self.names, columns, int(keep.sum()))


def client_name(path: Path) -> str | None:
    """File name without its ending, or None if it is not a file of data."""
    suffix = next((s for s in SUFFIXES if path.name.lower().endswith(s)), None)
    if suffix is None or path.name.startswith("."):
        return None
    return path.name[: -len(suffix)]


def read_table(path: Path, ignore: Sequence[str] = ()) -> Table:
    """Read a file but for the columns to ignore; at least one row, unique column names."""
    return table_of(path, _read_filled(path), ignore)


def read_rows(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """All rows of a file as they are written, text wherever it is CSV, and the same with decimal points for commas."""
    import polars as pl

    content = read_bytes(path)
    if not content.strip():
        raise DataError(f"{path}: empty file; put the client's rows there or remove it")
    if path.name.lower().endswith(".parquet"):
        written, separator = _read_parquet(path, content), ","
    else:
        written, separator = _read_csv(path, content)
    _some_rows(path, written)
    if separator != ";":
        return written, written
    return written, written.with_columns(pl.all().str.replace(_DECIMAL_COMMA, "$1.$2"))


def _read_filled(path: Path) -> pl.DataFrame:
    """The rows of a file that have a value: spreadsheets leave empty ones at the end."""
    import polars as pl

    _, frame = read_rows(path)
    gaps = [
        series.is_null() | series.is_in(MISSING_VALUES) if series.dtype == pl.String else series.is_null()
        for series in frame
    ]
    frame = frame.filter(~pl.all_horizontal(gaps))
    _some_rows(path, frame)
    return frame


def _some_rows(path: Path, frame: pl.DataFrame) -> None:
    if frame.height == 0:
        raise DataError(f"{path}: has a header but no rows; put the client's rows there or remove it")


def table_of(path: Path, frame: pl.DataFrame, ignore: Sequence[str] = ()) -> Table:
    """The columns of a frame; `path` is its name in messages."""
    columns = {series.name: _column(path, series) for series in frame if series.name not in ignore}
    return Table(path, tuple(frame.columns), columns, frame.height)


def split_by(path: Path, column: str, ignore: Sequence[str] = ()) -> dict[str, Table]:
    """One file that holds several clients: the rows of each, by its name in a column."""
    import polars as pl

    frame = _read_filled(path)
    if column not in frame.columns:
        raise DataError(f'{path}: no client column "{column}"; {nearest(column, frame.columns)}')
    names = _column(path, frame[column]).names()
    if gaps := names.null_count():
        raise DataError(
            f'{path}: client column "{column}" has no value in {gaps} of {frame.height} rows; complete or remove them'
        )
    frame = frame.drop(column)
    out = {}
    for name in sorted(names.unique().to_list()):
        out[name] = table_of(Path(f"{path}[{name}]"), frame.filter(pl.lit(names == name)), ignore)
    return out


def _read_parquet(path: Path, content: bytes) -> pl.DataFrame:
    import polars as pl

    try:
        check_parquet(content)
        return pl.read_parquet(io.BytesIO(content))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as e:
        raise DataError(f"{path}: truncated or corrupt Parquet file ({_first_line(e)}); write it again") from e


def _read_csv(path: Path, content: bytes) -> tuple[pl.DataFrame, str]:
    """The rows as text, null where nothing is written, and what separates the columns."""
    import polars as pl

    text = _decode(path, content)
    lines = _lines(text)
    separator = _separator(lines.split("\n", 1)[0])
    header = _header(path, lines, separator)
    marked = io.BytesIO(
        lines.encode("utf-8-sig")
    )  # or polars takes a first column "x^2" for the start of a zlib stream
    try:
        frame = pl.read_csv(marked, separator=separator, infer_schema=False, new_columns=header)
    except pl.exceptions.PolarsError as e:
        raise DataError(f"{path}: {_bad_line(text, separator, len(header)) or _first_line(e)}") from e
    # polars fills up short lines in silence; they show as gaps in the last column
    if frame[header[-1]].null_count() and (bad := _bad_line(text, separator, len(header))):
        raise DataError(f"{path}: {bad}")
    return frame, separator


def _lines(text: str) -> str:
    """Text with line ends that any reader knows, without blank lines; what stands in quotes is left as it is."""
    text = text.strip("\r\n") + "\n"
    has_old_ends = text.count("\r") > text.count("\r\n")
    if not has_old_ends and "\n\n" not in text and "\n\r\n" not in text:
        return text  # most files; the rest is slow
    parts = text.split('"')
    parts[::2] = [re.sub(r"[\r\n]+", "\n", part) for part in parts[::2]]
    return '"'.join(parts)


def _decode(path: Path, content: bytes) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):  # the mark of UTF-16, as spreadsheets write it
        try:
            return content.decode("utf-16")
        except UnicodeDecodeError:
            raise DataError(f"{path}: damaged UTF-16; save it as UTF-8") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = content[: e.start].count(b"\n") + 1
        raise DataError(f"{path}: not UTF-8 (byte 0x{content[e.start]:02x} in line {line}); save it as UTF-8") from e
    if "\0" in text:
        raise DataError(f"{path}: not UTF-8 (contains zero bytes, perhaps UTF-16); save it as UTF-8")
    return text


def _separator(header: str) -> str:
    """The most frequent of comma, semicolon, tab and bar in the header line, outside quotes."""
    bare = "".join(header.split('"')[::2])
    return max(SEPARATORS, key=bare.count)


def _header(path: Path, text: str, separator: str) -> list[str]:
    names = [name.strip() for name in next(_records(text, separator))]
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise DataError(f'{path}: column "{twice[0]}" appears more than once; rename or remove one')
    if "" in names:
        raise DataError(
            f"{path}: column {names.index('') + 1} has no name (a row index?); name it or write the file without it"
        )
    return names


def _records(text: str, separator: str) -> Any:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a field may be long
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator)


def _bad_line(text: str, separator: str, width: int) -> str | None:
    """The first line with more or fewer fields than the header, told for people."""
    reader = _records(text, separator)
    for row in reader:
        if row and len(row) != width:
            return f"line {reader.line_num} has {len(row)} fields, the header has {width}; correct it"
    return None


def _column(path: Path, series: pl.Series) -> Column:
    import polars as pl

    kind = series.dtype
    if kind == pl.Boolean or isinstance(kind, pl.Categorical | pl.Enum) or kind == pl.Null:
        series = series.cast(pl.String)
    if series.dtype == pl.String:
        text = series.str.strip_chars()
        text = text.set(text.is_in(MISSING_VALUES), None)
        if (days := _days(text)) is not None:
            return Column(text, days, is_date=True)
        number = text.cast(pl.Float64, strict=False)
        if number.null_count() > text.null_count() and (amount := amounts(text)) is not None:
            return Column(text, amount[0], unit=amount[1])
    elif kind.is_numeric():
        series = series.fill_nan(None) if kind.is_float() else series
        text, number = series.cast(pl.String), series.cast(pl.Float64)
        if kind.is_integer() and (days := compact_days(text)) is not None:
            return Column(text, days, is_date=True)
    elif kind == pl.Date or isinstance(kind, pl.Datetime):
        return Column(series.cast(pl.String), series.cast(pl.Datetime("us")).dt.epoch("us") / 86_400e6, is_date=True)
    else:
        raise DataError(
            f'{path}: column "{series.name}" has the type {kind}, neither numbers nor text nor dates; '
            f"leave it out with data.ignore = ['{series.name}']"
        )
    return Column(text, number.set(~number.is_finite(), None))


def _days(text: pl.Series) -> pl.Series | None:
    """Days since 1970-01-01 if all values are written as dates; null where there is no such day."""
    import polars as pl

    first = first_of(text)
    if first is None:
        return None
    for pattern, (year, month, day) in _DATES.items():
        if re.search(pattern, first) and text.drop_nulls().str.contains(pattern).all():
            parts = [text.str.extract(pattern, i).str.zfill(2) for i in (year, month, day)]
            clock = [text.str.extract(pattern, i).fill_null("00") for i in (4, 5, 6)]
            written = parts[0] + "-" + parts[1] + "-" + parts[2] + " " + clock[0] + ":" + clock[1] + ":" + clock[2]
            return written.str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False).dt.epoch("s").cast(pl.Float64) / 86_400
    return days if (days := named_days(text)) is not None else compact_days(text)


def _number_name(number: float) -> str:
    return str(int(number)) if number.is_integer() else repr(number)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
