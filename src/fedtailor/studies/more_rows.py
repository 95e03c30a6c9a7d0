"""New rows of some sites beside those that a fit read, kept as files in the folder of an update."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.data.configs import FolderConfig
from fedtailor.data.tabular.align import renamed_columns
from fedtailor.data.tabular.read import as_frame, files_of, read_rows
from fedtailor.errors import DataError
from fedtailor.experiments.store import write_atomically

if TYPE_CHECKING:
    import polars as pl


def all_rows(source: FolderConfig, rows: Mapping[str, Any], out: Path) -> FolderConfig:
    """The source of all rows: those that the fit read, and the new ones at the end of each site's."""
    import polars as pl

    if not source.path.exists():
        raise DataError(f"{source.path}: the rows of the fit are no longer there; give all rows with --data")
    added = {str(name): as_frame(frame, f'new rows of "{name}"') for name, frame in rows.items()}
    if source.client_column is not None:
        column, whole = source.client_column, read_rows(source.path)[1]
        named = [frame.with_columns(pl.lit(name).alias(column)) for name, frame in added.items()]
        content = {"sites.parquet": _parquet(_joined(whole, named, str(source.path)))}
        path = Path("sites.parquet")
    else:
        frames = {name: read_rows(file)[1] for name, file in files_of(source.path).items()}
        for name, frame in added.items():
            if not name or name.startswith(".") or "/" in name:
                raise DataError(f'site "{name}": cannot be the name of a file; use letters, digits, "-" and "_"')
            other = frames.get(name, next(iter(frames.values())).clear())
            frames[name] = _joined(other, [frame], f"{name}, new rows")
        content = {f"{name}.parquet": _parquet(frame) for name, frame in frames.items()}
        path = Path()
    folder = out / "data"
    saved = {file.name: file.read_bytes() for file in folder.glob("*.parquet")}
    if saved != content:
        shutil.rmtree(folder, ignore_errors=True)
        for name, parquet in content.items():
            write_atomically(folder / name, parquet)
    return source.model_copy(update={"path": folder / path})


def _joined(old: pl.DataFrame, new: list[pl.DataFrame], origin: str) -> pl.DataFrame:
    """Rows under rows, by the names of columns; of several types they are text, as in a CSV file."""
    import polars as pl

    parts = [old]
    for rows in new:
        frame = rows.rename(renamed_columns(rows.columns, old.columns))
        missing = [name for name in old.columns if name not in frame.columns]
        more = [name for name in frame.columns if name not in old.columns]
        if missing or more:
            words = [f'no column "{missing[0]}"'] if missing else []
            words += [f'a column "{more[0]}" that the fit does not know'] if more else []
            raise DataError(f"{origin}: columns changed: {' and '.join(words)}; correct it, or fit anew")
        parts.append(frame.select(old.columns))
    kinds = {name: {part.schema[name] for part in parts if part.height} for name in old.columns}
    as_text = [name for name, dtypes in kinds.items() if len(dtypes) > 1]
    filled = [part.with_columns(pl.col(as_text).cast(pl.String)) for part in parts if part.height]
    return pl.concat(filled, how="vertical_relaxed") if filled else old


def _parquet(frame: pl.DataFrame) -> bytes:
    held = io.BytesIO()
    frame.write_parquet(held)
    return held.getvalue()
