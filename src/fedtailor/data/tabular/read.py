"""Read tables of clients from CSV and Parquet files, and frames of polars or pandas."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from fedtailor.data.configs import FolderConfig
from fedtailor.data.files import SUFFIXES, client_name, expand_home, read_bytes
from fedtailor.data.tabular.columns import MISSING_VALUES, ClientTable, Column, column_from_series
from fedtailor.data.tabular.parquet_check import check as check_parquet
from fedtailor.errors import DataError, nearest

# files with ";" between columns often have "," in numbers
_DECIMAL_COMMA = r"^\s*([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)\s*$"
SEPARATORS = ",;\t|"
WINDOWS = "cp1252"  # Latin-1 with quotes and the euro, as spreadsheets write it


def read_table(path: Path, ignore: Sequence[str] = ()) -> ClientTable:
    """Read a file without the columns to ignore; it must have a row and unique column names."""
    return replace(table_from_frame(path, _read_filled(path), ignore), notes=_note_encoding(path))


def read_rows(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """All rows of a file as they are written (as text if it is CSV), and with decimal points in place of commas."""
    content = read_bytes(path)
    if not content.strip():
        raise DataError(f"{path}: empty file; put the client's rows there or remove it")
    if path.name.lower().endswith(".parquet"):
        written, separator = _read_parquet(path, content), ","
    else:
        written, separator = _read_csv(path, content)
    _require_rows(path, written)
    if separator != ";":
        return written, written
    return written, written.with_columns(pl.all().str.replace(_DECIMAL_COMMA, "$1.$2"))


def _read_filled(path: Path) -> pl.DataFrame:
    """Rows of a file that have a value; spreadsheets leave empty ones at the end."""
    _, frame = read_rows(path)
    gaps = [
        series.is_null() | series.is_in(MISSING_VALUES) if series.dtype == pl.String else series.is_null()
        for series in frame
    ]
    frame = frame.filter(~pl.all_horizontal(gaps))
    _require_rows(path, frame)
    return frame


def _require_rows(path: Path, frame: pl.DataFrame) -> None:
    if frame.height == 0:
        raise DataError(f"{path}: has a header but no rows; put the client's rows there or remove it")


def table_from_frame(path: Path, frame: pl.DataFrame, ignore: Sequence[str] = ()) -> ClientTable:
    """A frame as a table; `path` is its name in messages."""
    columns = {series.name: column_from_series(path, series) for series in frame if series.name not in ignore}
    return ClientTable(path, tuple(frame.columns), columns, frame.height)


def split_by_client(path: Path, column: str, ignore: Sequence[str] = ()) -> dict[str, ClientTable]:
    frame = _read_filled(path)
    if column not in frame.columns:
        raise DataError(f'{path}: no client column "{column}"; {nearest(column, frame.columns)}')
    names = column_from_series(path, frame[column]).names()
    if gaps := names.null_count():
        raise DataError(
            f'{path}: client column "{column}" has no value in {gaps} of {frame.height} rows; complete or remove them'
        )
    _refuse_twin_names(path, column, names)
    frame = frame.drop(column)
    whole = {s.name: column_from_series(path, s) for s in frame if s.name not in ignore}
    plain = [name for name, held in whole.items() if _is_plain(held)]  # read alike at every site
    notes = _note_encoding(path)
    at_once = ClientTable(path, tuple(plain), {name: whole[name] for name in plain}, frame.height)
    rest = frame.select([name for name in frame.columns if name not in plain])
    rows_of = names.alias("name").to_frame().with_row_index("row").group_by("name").agg("row").sort("name")
    out = {}
    for name, rows in rows_of.iter_rows():
        file = Path(f"{path}[{name}]")
        read = at_once.rows_at(rows).columns
        if rest.width:
            read |= table_from_frame(file, rest[rows], ignore).columns
        columns = {s: read[s] for s in frame.columns if s in read}
        numbers = pl.Series(rows, dtype=pl.UInt32)
        out[name] = ClientTable(file, tuple(frame.columns), columns, len(rows), numbers, notes)
    return out


def _refuse_twin_names(path: Path, column: str, names: pl.Series) -> None:
    """Two names that differ in capitals or blanks alone are most often one site."""
    first: dict[str, str] = {}
    for name in names.unique(maintain_order=True).to_list():
        other = first.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            row = int((names == name).arg_true()[0]) + 1
            raise DataError(
                f'{path}: client column "{column}" has "{other}" and, in data row {row}, "{name}"; write the site in '
                "one way, or give them names that differ in more than capitals and blanks"
            )


def _is_plain(column: Column) -> bool:
    """Whether a column is of numbers alone, none of which may be a date."""
    return (
        not column.is_date
        and column.number.null_count() == column.text.null_count()
        and not column.unit
        and not column.text.str.contains(r"^\d{8}$").any()
    )


def _read_parquet(path: Path, content: bytes) -> pl.DataFrame:
    try:
        check_parquet(content)
        return pl.read_parquet(io.BytesIO(content))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as e:
        raise DataError(f"{path}: truncated or corrupt Parquet file ({_first_line(e)}); write it again") from e


def _read_csv(path: Path, content: bytes) -> tuple[pl.DataFrame, str]:
    """Rows as text, with null for empty fields, and the separator."""
    text = _decode(path, content)
    lines = _normalise_lines(text)
    separator = _find_separator(lines.split("\n", 1)[0])
    header, empty = _read_header(path, lines, separator)
    marked = io.BytesIO(
        lines.encode("utf-8-sig")
    )  # or polars takes a first column "x^2" for the start of a zlib stream
    try:
        frame = pl.read_csv(marked, separator=separator, infer_schema=False, new_columns=[*header, *empty])
    except pl.exceptions.PolarsError as e:
        raise DataError(f"{path}: {_find_bad_line(text, separator, len(header) + len(empty)) or _first_line(e)}") from e
    for name in empty:  # spreadsheets end lines with separators
        if frame[name].null_count() < frame.height:
            raise DataError(_without_name(path, len(header) + 1))
    frame = frame.drop(empty)
    # polars silently fills short lines; they show as gaps in the last column
    if frame[header[-1]].null_count() and (bad := _find_bad_line(text, separator, len(header) + len(empty))):
        raise DataError(f"{path}: {bad}")
    return frame, separator


def _normalise_lines(text: str) -> str:
    """Text with \\n as line ends and without blank lines; quoted fields are left as they are."""
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
        try:
            text = content.decode(WINDOWS)
        except UnicodeDecodeError:
            line = content[: e.start].count(b"\n") + 1
            raise DataError(
                f"{path}: not UTF-8 (byte 0x{content[e.start]:02x} in line {line}); save it as UTF-8"
            ) from e
    if "\0" in text:
        raise DataError(f"{path}: not UTF-8 (contains zero bytes, perhaps UTF-16); save it as UTF-8")
    return text


def _note_encoding(path: Path) -> tuple[str, ...]:
    """That a file is not UTF-8, with the first word that shows how it was read."""
    content = read_bytes(path)
    if path.name.lower().endswith(".parquet") or content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return ()
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = content[: e.start].count(b"\n")
        text = content.split(b"\n")[line].decode(WINDOWS)
        word = next(word for word in re.findall(r"\w+|\S", text) if not word.isascii())
        return (
            f'{path.name}: not UTF-8; read as Windows-1252 (Latin-1), such as "{word}" in line {line + 1}; if that is '
            "wrong, save it as UTF-8",
        )
    return ()


def _find_separator(header: str) -> str:
    """The most frequent separator in the header line, outside quotes."""
    bare = "".join(header.split('"')[::2])
    return max(SEPARATORS, key=bare.count)


def _without_name(path: Path, number: int) -> str:
    return f"{path}: column {number} has no name (a row index?); name it or write the file without it"


def _read_header(path: Path, text: str, separator: str) -> tuple[list[str], list[str]]:
    """The names of the columns, and names for columns without one at the end, which may be empty."""
    names = [name.strip() for name in next(_csv_reader(text, separator))]
    width = len(names)
    while names and not names[-1]:
        names.pop()
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise DataError(f'{path}: column "{twice[0]}" appears more than once; rename or remove one')
    if "" in names or not names:
        raise DataError(_without_name(path, names.index("") + 1 if names else 1))
    return names, [f"\0{i}" for i in range(len(names), width)]


def _csv_reader(text: str, separator: str) -> Any:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a field may be long
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator)


def _find_bad_line(text: str, separator: str, width: int) -> str | None:
    """Describe the first line with more or fewer fields than the header."""
    reader = _csv_reader(text, separator)
    for row in reader:
        if row and len(row) > width == 1:
            return f"line 1 has one field, line {reader.line_num} has {len(row)}; remove a title above the header"
        if row and len(row) != width:
            return f"line {reader.line_num} has {len(row)} fields, the header has {width}; correct it"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def as_frame(rows: Any, origin: str = "rows") -> pl.DataFrame:
    """A polars frame from columns by name or a frame of pandas, which is not imported; `origin` is for messages."""
    if isinstance(rows, pl.DataFrame):
        return rows
    if isinstance(rows, pl.LazyFrame):
        return rows.collect()
    if isinstance(rows, Mapping):
        return pl.DataFrame({str(name): _series_from_values(str(name), list(values)) for name, values in rows.items()})
    if hasattr(rows, "columns") and hasattr(rows, "iloc"):  # pandas
        names = [str(name) for name in rows.columns]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(f'{origin}: column "{repeated[0]}" appears more than once; rename or remove one')
        return pl.DataFrame([_series_from_pandas(name, rows.iloc[:, i]) for i, name in enumerate(names)])
    raise DataError(f"{origin}: is a {type(rows).__name__}; give a frame of polars or pandas, or columns by name")


def _series_from_pandas(name: str, series: Any) -> pl.Series:
    if getattr(series.dtype, "kind", "O") in "iufbM" and type(series.dtype).__module__.startswith("numpy"):
        return pl.Series(name, series.to_numpy())
    return _series_from_values(
        name, [None if gap else value for value, gap in zip(series.tolist(), series.isna(), strict=True)]
    )


def _series_from_values(name: str, values: list[Any]) -> pl.Series:
    """A series; values of several types become text, as in a CSV file."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and not kinds <= {int, float}:
        return pl.Series(name, [None if value is None else str(value) for value in values], dtype=pl.String)
    return pl.Series(name, values, strict=False)


def read_client_tables(config: FolderConfig) -> dict[str, ClientTable]:
    tables = {name: table for name, table in _read_all(config).items() if name not in config.without}
    if not tables:
        raise DataError(f"{config.path}: data.without leaves no site")
    return tables


def _read_all(config: FolderConfig) -> dict[str, ClientTable]:
    path = expand_home(config.path)
    if config.client_column is None:
        return _read_folder(path, config.ignore, config.without)
    if not path.is_file():
        problem = "a folder; data.client_column is for one file" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {problem} that holds all clients")
    if client_name(path) is None:
        raise DataError(f"{path}: not a data file; known endings: {', '.join(SUFFIXES)}")
    if config.client_column == config.target:
        raise DataError(f'{path}: "{config.target}" is both target and client column; choose another of them')
    return split_by_client(path, config.client_column, config.ignore)


def _read_folder(folder: Path, ignore: Sequence[str], without: Sequence[str]) -> dict[str, ClientTable]:
    return {name: read_table(path, ignore) for name, path in client_files(folder).items() if name not in without}


def client_files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        hint = "is a file; give the folder that holds one file per client, or name its column with data.client_column"
        problem = hint if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {problem}")
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        name = client_name(path)
        if name is None or not path.is_file():
            continue
        if name in files:
            raise DataError(f'{path}: client "{name}" is also in {files[name].name}; keep one of them')
        files[name] = path
    if not files:
        raise DataError(f"{folder}: no data files; put one file per client there ({', '.join(SUFFIXES)})")
    return {name: files[name] for name in sorted(files)}


def read_text_columns(file: Path, *names: str) -> list[tuple[str, ...]]:
    """Columns of a file as text; an empty cell is an error."""
    frame, _ = read_rows(file)
    for name in names:
        if name not in frame.columns:
            raise DataError(f'{file}: no column "{name}"; {nearest(name, frame.columns)}')
    columns = [[None if v is None else str(v).strip() for v in frame[name].to_list()] for name in names]
    for name, values in zip(names, columns, strict=True):
        if empty := [row for row, value in enumerate(values, 1) if not value]:
            raise DataError(f'{file}: row {empty[0]} has nothing in column "{name}"; fill it or remove the row')
    return list(zip(*columns, strict=True))
