"""Rows of several sites in one file, each predicted by the model of its site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedtailor.data.tabular.read import read_rows
from fedtailor.errors import DataError, RunError, nearest
from fedtailor.experiments.store import FIT, RunFolder, read_json
from fedtailor.serving.described import part_of
from fedtailor.serving.personal import Personal, personal, predicted_rows

if TYPE_CHECKING:
    import polars as pl


def site_column(path: Path) -> str | None:
    """The column that named the site in training, if there was one."""
    if (path / FIT).exists():
        record = read_json(path / FIT)
        if "newcomers" not in record:
            raise RunError(f"{path}: not finished yet; call the same fit again")
        path = part_of(path, record["newcomers"])
    column: str | None = getattr(RunFolder.open(path).config.data, "client_column", None)
    return column


def predicted_by_site(path: Path, file: Path, column: str, interval: float = 0.0) -> tuple[pl.DataFrame, list[str]]:
    """The rows of a file with their predictions, in their order, and notes; sites nobody knows get the common model."""
    import polars as pl

    frame, values = read_rows(file)
    if column not in frame.columns:
        raise DataError(f'{file}: no column "{column}", which names the site; {nearest(column, frame.columns)}')
    names = frame[column].cast(pl.String)
    if names.null_count():
        raise DataError(f'{file}: column "{column}" names no site in {names.null_count()} of {frame.height} rows')
    known = _sites(path)
    parts, notes, strangers = [], list[str](), list[str]()
    for name in names.unique(maintain_order=True).to_list():
        at = names == name
        if name in known:
            model = personal(path, name)
        else:
            strangers.append(name)
            model = _common(path, known)
        rows = frame.filter(at).with_columns(pl.Series(ORDER, at.arg_true()))
        parts.append(predicted_rows(model, file, rows, values.filter(at), interval))
        notes += model.notes
    if strangers:
        notes.append(f"{len(strangers)} sites are not in the fit and got the common model: {', '.join(strangers[:5])}")
    return pl.concat(parts).sort(ORDER).drop(ORDER), notes


ORDER = "order of rows in the file"


def _sites(path: Path) -> list[str]:
    if (path / FIT).exists():
        record = read_json(path / FIT)
        source = part_of(path, record["newcomers"])
        return [*record["sites"], *(p.parent.name for p in source.glob("newcomers/*/index.json"))]
    return list(RunFolder.open(path).about["clients"])


def _common(path: Path, known: list[str]) -> Personal:
    """The model that all have in common; a fit has one."""
    if (path / FIT).exists() and "common" in (record := read_json(path / FIT)):
        return personal(part_of(path, record["common"]), known[0])
    raise DataError(f"{path}: has no common model for sites that it does not know; known are {', '.join(known[:5])}")
