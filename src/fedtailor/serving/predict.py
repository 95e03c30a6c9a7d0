"""Predictions for the rows of a file: of one site, or each by the model of its site."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from fedtailor.core.data import count
from fedtailor.core.trees import Tree, tree_map
from fedtailor.data.files import SUFFIXES, client_name, escape_formula, read_npz
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.read import read_rows
from fedtailor.errors import DataError, RunError, nearest
from fedtailor.experiments.store import FIT, RunFolder, latest, part_of, read_json, write_atomically
from fedtailor.tables.intervals import interval_around
from fedtailor.tables.serve import Personal, ServedModels, personal

ORDER = "order of rows in the file"
ENDS = ("low", "high")


def predict_file(model: Personal, file: Path, interval: float = 0.0) -> pl.DataFrame:
    """The rows of a file with a column `prediction` and, for classes, their probabilities; for numbers an interval."""
    if file.suffix == ".npz":
        x = read_inputs(model, file)
        return _add_predictions(model, file, pl.DataFrame({"sample": range(count(x))}), x, interval)
    if client_name(file) is None:
        raise DataError(f"{file}: not a data file; known endings: {', '.join(SUFFIXES)}, .npz")
    return predict_rows(model, file, *read_rows(file), interval)


def read_inputs(model: Personal, file: Path) -> Tree:
    """The samples of an .npz file: an array x, or one for each input of the model, by its name."""
    arrays = read_npz(file, list(model.inputs) or ["x"])
    parts = {k: model.in_type(torch.from_numpy(np.ascontiguousarray(v))) for k, v in arrays.items()}
    return parts if model.inputs else parts["x"]


def predict_rows(
    model: Personal, file: Path, frame: pl.DataFrame, values: pl.DataFrame, interval: float = 0.0
) -> pl.DataFrame:
    """Rows as they are written, with predictions; `values` are the same with decimal points."""
    return _add_predictions(model, file, frame, model.encode(model.table(file, values)), interval)


def _add_predictions(model: Personal, file: Path, frame: pl.DataFrame, x: Tree, interval: float) -> pl.DataFrame:
    try:
        predictions = model.readable(model.outputs(x))
    except RuntimeError as error:
        shape = tree_map(lambda v: list(v.shape[1:]), x)
        raise DataError(f"{file}: its samples of shape {shape} do not fit the model: {error}") from None
    columns: dict[str, Any]
    if isinstance(predictions, dict):
        columns = {f"prediction {name}": values.tolist() for name, values in predictions.items()}
    elif model.task == "classification":
        names = model.classes or tuple(map(str, range(predictions.shape[1])))
        columns = {"prediction": [names[i] for i in predictions.argmax(1).tolist()]}
        columns |= {f"probability {name}": predictions[:, i].tolist() for i, name in enumerate(names)}
    elif predictions.dim() > 2:
        raise DataError(
            f"{file}: predictions have shape {list(predictions.shape)}, which a table does not hold; "
            "predict them from Python"
        )
    else:
        ends = [""] if predictions.shape[1] == 1 else [f" {i + 1}" for i in range(predictions.shape[1])]
        columns = {f"prediction{end}": predictions[:, i].tolist() for i, end in enumerate(ends)}
    if interval:
        if model.task not in ("regression", "count"):
            raise DataError("--interval: is for numbers; of classes there are probabilities")
        half = model.extras.half_width(interval, model.source)
        sides = interval_around(predictions[:, 0].double().numpy(), half, model.error_scale)
        columns |= {f"{end} {100 * interval:g} %": v.tolist() for end, v in zip(ENDS, sides, strict=True)}
    for name in columns:
        if name in frame.columns:
            raise DataError(f'{file}: has a column "{name}" already; rename or remove it')
    return frame.with_columns(**{name: pl.Series(name, values) for name, values in columns.items()})


def write_frame(path: Path, frame: pl.DataFrame) -> None:
    """As Parquet or CSV, by the ending; whole or not at all."""
    check_ending(path)
    name, content = path.name.lower(), io.BytesIO()
    if name.endswith(".parquet"):
        frame.write_parquet(content)
    else:
        _escape_formulas(_flatten_nested(frame)).write_csv(
            content, separator="\t" if name.endswith((".tsv", ".tsv.gz")) else ","
        )
    write_atomically(path, gzip.compress(content.getvalue(), mtime=0) if name.endswith(".gz") else content.getvalue())


def _escape_formulas(frame: pl.DataFrame) -> pl.DataFrame:
    """Predicted classes that a spreadsheet would take for a formula; the rows of the file stay as they were written."""
    if "prediction" not in frame.columns or not frame.schema["prediction"].is_(pl.String):
        return frame
    return frame.with_columns(frame["prediction"].map_elements(escape_formula, return_dtype=pl.String))


def check_ending(path: Path) -> None:
    """Fail unless predictions can be written to a file of this name."""
    if not path.name.lower().endswith(SUFFIXES):
        raise RunError(f"{path}: cannot be written; known endings: {', '.join(SUFFIXES)}")


def _flatten_nested(frame: pl.DataFrame) -> pl.DataFrame:
    """A frame with text for what CSV has no form of, such as lists."""
    odd = [s for s in frame if s.dtype.is_nested() or s.dtype in (pl.Duration, pl.Binary, pl.Object)]
    return frame.with_columns(
        pl.Series(s.name, [None if value is None else str(value) for value in s.to_list()], dtype=pl.String)
        for s in odd
    )


def predict_by_site(path: Path, file: Path, column: str, interval: float = 0.0) -> tuple[pl.DataFrame, list[str]]:
    """The rows of a file with their predictions, in their order, and notes; unknown sites get the common model."""
    frame, values = read_rows(file)
    if column not in frame.columns:
        raise DataError(f'{file}: no column "{column}", which names the site; {nearest(column, frame.columns)}')
    names = frame[column].cast(pl.String)
    if names.null_count():
        raise DataError(f'{file}: column "{column}" names no site in {names.null_count()} of {frame.height} rows')
    served = ServedModels(latest(path))
    known = dict.fromkeys(_sites(path))
    parts, notes, strangers = [], list[str](), list[str]()
    rows_of = names.to_frame("name").with_row_index("row").group_by("name", maintain_order=True).agg("row")
    frame = frame.with_columns(pl.Series(ORDER, range(frame.height)))
    common: Personal | None = None
    table: ClientTable | None = None
    is_first = True
    for name, at in rows_of.iter_rows():
        if name in known:
            model = served.personal(name)
        else:
            strangers.append(name)
            model = common = common or _common(path, list(known))
        if is_first:
            table, is_first = _read_at_once(model, file, values), False
        parts.append(_add_predictions(model, file, frame[at], _encode(model, file, table, values, at), interval))
        notes += model.notes
    if strangers:
        notes.append(f"{len(strangers)} sites are not in the fit and got the common model: {', '.join(strangers[:5])}")
    return pl.concat(parts).sort(ORDER).drop(ORDER), notes


def _read_at_once(model: Personal, file: Path, values: pl.DataFrame) -> ClientTable | None:
    """The columns of all sites together; None where they can only be read site by site."""
    try:
        return model.table(file, values)
    except DataError:
        return None


def _encode(model: Personal, file: Path, table: ClientTable | None, values: pl.DataFrame, rows: list[int]) -> Tree:
    """A site's rows; on its own its column may be of another kind than with others, such as dates in another form."""
    if table is not None:
        try:
            return model.encode(table.rows_at(rows))
        except DataError:
            pass
    return model.encode(model.table(file, values[rows]))


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
