"""Frames that were given for sites, kept as files beside what was made of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.data.tabular.read import as_frame
from fedtailor.errors import DataError
from fedtailor.experiments.store import write_atomically

if TYPE_CHECKING:
    import polars as pl


def keep(sites: Any, folder: Path, client_column: str | None) -> Path:
    """Frames as Parquet files; returns what to read."""
    if client_column is not None or not isinstance(sites, Mapping):
        if client_column is None:
            raise DataError("sites: one frame needs client_column, the column that names the site")
        return _frames_folder({"sites": as_frame(sites, "sites")}, folder) / "sites.parquet"
    frames = {str(name): as_frame(frame, f'site "{name}"') for name, frame in sites.items()}
    for name in frames:
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise DataError(f'site "{name}": cannot be the name of a file; use letters, digits, "-" and "_"')
    return _frames_folder(frames, folder)


def _frames_folder(frames: Mapping[str, pl.DataFrame], folder: Path) -> Path:
    """A folder that holds these frames, and no others."""
    import polars as pl

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
