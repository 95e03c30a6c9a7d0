"""What a fit reads: files, frames or a source that the user names, and the new rows of an update."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from fedtailor import data
from fedtailor.core.data import FederatedData
from fedtailor.data import SOURCES
from fedtailor.data.configs import FolderConfig
from fedtailor.data.tabular.align import match_columns
from fedtailor.data.tabular.read import as_frame, client_files, read_rows
from fedtailor.errors import ConfigError, DataError
from fedtailor.experiments.building import load
from fedtailor.experiments.config import parse, with_settings, with_values
from fedtailor.experiments.store import write_atomically

ROUNDS = 32
TABLES = ("folder", "heart-disease")  # sources of tables
MOST_ROWS = 100_000  # of a site that are used, unless data.max_samples says otherwise
LOADER = re.compile(r"[\w.]+:\w+")


def source_of(
    sites: str | Path, target: str = "", client_column: str | None = None, **of_target: str
) -> dict[str, Any]:
    """The table [data] for what a user names: files, a data source, or a function "module:load".

    of_target: task and target_scale, if given.
    """
    name = str(sites)
    if not Path(sites).exists() and (name in SOURCES or LOADER.fullmatch(name)):
        if target or client_column or any(of_target.values()):
            raise ConfigError(
                f"fit {name}: the source knows what to predict; leave out --target, --client-column, --task and "
                "--target-scale"
            )
        return {"source": name}
    if not target:
        raise ConfigError(f"{name}: which column is to be predicted? Name it with --target")
    files = {"source": "folder", "path": name, "target": target} | {k: v for k, v in of_target.items() if v}
    return files if client_column is None else files | {"client_column": client_column}


MOST_COEFFICIENTS = 4000  # above, every site would solve for longer than a network trains


def is_table_fit(data: FederatedData, tables: Mapping[str, Any], algorithm: str) -> bool:
    """Whether this is a table, with no model or task prescribed."""
    if algorithm != "auto" or "model" in tables or "task" in tables or data.preparation is None:
        return False
    is_known = data.is_plain and data.task in ("classification", "regression", "count") and len(data.shape) == 1
    return is_known and (data.shape[0] + 1) * max(data.outputs - 1, 1) <= MOST_COEFFICIENTS


def read_source(
    source: Mapping[str, Any],
    *,
    algorithm: str = "auto",
    rounds: int = 0,
    seed: int = 0,
    settings: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    data_root: Path | None = None,
    loaded: FederatedData | None = None,
) -> tuple[dict[str, Any], FederatedData]:
    """The configuration as far as the user sets it, and the data."""
    tables: dict[str, Any] = {"seed": seed, "rounds": rounds or ROUNDS, "data": _with_defaults(source)}
    tables = with_values(with_settings(tables, settings), values or {})
    if "algorithm" in tables and algorithm == "auto":
        raise ConfigError("--set algorithm...: for one algorithm; name it with --algorithm")
    if loaded is not None:
        return tables, loaded
    has_val = "val" in source or "data.val" in (values or {}) or any(s.startswith("data.val=") for s in settings)
    if algorithm == "auto" and "model" not in tables and tables["data"]["source"] in TABLES and not has_val:
        folded = tables | {"data": tables["data"] | {"val": 0.0}}  # folds take the place of validation rows
        folded_data = load(parse(folded, origin="fit"), data_root)
        if is_table_fit(folded_data, folded, algorithm):
            return folded, folded_data
    return tables, load(parse(tables, origin="fit"), data_root)


def _with_defaults(source: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a fit: more validation samples than in a single run."""
    kind = data.SOURCES.get(str(source.get("source", "folder")))
    known = {} if kind is None else kind.config.model_fields
    out: dict[str, Any] = {"val": 0.2} if "val" in known else {}
    if source.get("source", "folder") == "folder":
        out |= {"source": "folder", "max_samples": MOST_ROWS}
    return out | dict(source)


def keep_frames(sites: Any, folder: Path, client_column: str | None) -> Path:
    """Write frames as Parquet files; returns the path to read."""
    if client_column is not None or not isinstance(sites, Mapping):
        if client_column is None:
            raise DataError("sites: one frame needs client_column, the column that names the site")
        return _write_frames({"sites": as_frame(sites, "sites")}, folder) / "sites.parquet"
    frames = {str(name): as_frame(frame, f'site "{name}"') for name, frame in sites.items()}
    for name in frames:
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise DataError(f'site "{name}": cannot be the name of a file; use letters, digits, "-" and "_"')
    return _write_frames(frames, folder)


def _write_frames(frames: Mapping[str, pl.DataFrame], folder: Path) -> Path:
    """Write frames to a folder; a `DataError` if it holds other ones."""
    content = {f"{name}.parquet": _parquet(frame) for name, frame in frames.items()}
    if folder.exists():
        saved = {path.name: pl.read_parquet(path) for path in folder.glob("*.parquet")}
        wanted = {name: pl.read_parquet(parquet) for name, parquet in content.items()}
        if saved.keys() != wanted.keys() or not all(frame.equals(saved[name]) for name, frame in wanted.items()):
            raise DataError(f"{folder}: holds other frames than those given; choose another folder with out")
        return folder
    for name, parquet in content.items():
        write_atomically(folder / name, parquet)
    return folder


def _parquet(frame: pl.DataFrame) -> bytes:
    held = io.BytesIO()
    frame.write_parquet(held)
    return held.getvalue()


def append_rows(source: FolderConfig, rows: Mapping[str, Any], out: Path) -> FolderConfig:
    """The source of all rows: those of the fit, followed by the new ones of each site."""
    if not source.path.exists():
        raise DataError(f"{source.path}: the rows of the fit are no longer there; give all rows with --data")
    added = {str(name): as_frame(frame, f'new rows of "{name}"') for name, frame in rows.items()}
    if source.client_column is not None:
        column, whole = source.client_column, read_rows(source.path)[1]
        named = [frame.with_columns(pl.lit(name).alias(column)) for name, frame in added.items()]
        content = {"sites.parquet": _parquet(_append(whole, named, str(source.path)))}
        path = Path("sites.parquet")
    else:
        frames = {name: read_rows(file)[1] for name, file in client_files(source.path).items()}
        for name, frame in added.items():
            if not name or name.startswith(".") or "/" in name:
                raise DataError(f'site "{name}": cannot be the name of a file; use letters, digits, "-" and "_"')
            other = frames.get(name, next(iter(frames.values())).clear())
            frames[name] = _append(other, [frame], f"{name}, new rows")
        content = {f"{name}.parquet": _parquet(frame) for name, frame in frames.items()}
        path = Path()
    folder = out / "data"
    saved = {file.name: file.read_bytes() for file in folder.glob("*.parquet")}
    if saved != content:
        shutil.rmtree(folder, ignore_errors=True)
        for name, parquet in content.items():
            write_atomically(folder / name, parquet)
    return source.model_copy(update={"path": folder / path})


def _append(old: pl.DataFrame, new: list[pl.DataFrame], origin: str) -> pl.DataFrame:
    """Append rows by column name; columns with several types become text, as in a CSV file."""
    parts = [old]
    for rows in new:
        frame = rows.rename(match_columns(rows.columns, old.columns))
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
