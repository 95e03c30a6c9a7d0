"""Your own data: a folder with one CSV or Parquet file per client, or one file with a column that names the client."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import FolderConfig
from fedtailor.data.files import SUFFIXES, client_name
from fedtailor.data.splits import split
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.encode import pooled_moments, stack_rows
from fedtailor.data.tabular.preparation import CategoryColumn, Floats, NumberColumn, Preparation, Scale
from fedtailor.data.tabular.prepare import check_newcomer, prepare_tables, rename_columns
from fedtailor.data.tabular.read import read_client_tables, read_table
from fedtailor.data.tabular.target import (
    newcomer_target,
    numeric_values,
)
from fedtailor.errors import DataError


def load(config: FolderConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read, prepare, split and encode the tables of all clients; `root` is not needed."""
    return prepare_tables(read_client_tables(config), config, seed)


def load_newcomer(config: FolderConfig, path: Path, name: str, *, seed: int) -> FederatedData:
    """A new client, prepared like those of the folder, which determine columns, types, classes and scales."""
    if client_name(path) is None:
        raise DataError(f"{path}: not a data file; the run reads {', '.join(SUFFIXES)}")
    tables = read_client_tables(config)
    if name in tables:
        raise DataError(f'{tables[name].path}: "{name}" is a client of the run already; choose another name')
    return prepare_tables(tables, config, seed, {name: read_table(path, config.ignore)}).only([len(tables)])


def prepare_newcomer(
    preparation: Preparation, config: FolderConfig, table: ClientTable, name: str, seed: int
) -> FederatedData:
    """A newcomer as a federation of one, prepared as recorded in a run, without the other clients' files."""
    target, columns = preparation.target, preparation.columns
    table = rename_columns(table, (target.name, *(c.name for c in columns)))
    kinds = {c.name: isinstance(c, CategoryColumn) for c in columns}
    dates = [c.name for c in columns if isinstance(c, NumberColumn) and c.is_date]
    check_newcomer(table, target.name, kinds, dates)
    y = newcomer_target(table, target.name, target)
    is_class = target.task == "classification"
    cut = split(len(y), y if is_class else None, config, seed=seed, client=name)
    numeric = {
        c: numeric_values(table.columns[c].of_kind(c in dates)) for c, is_category in kinds.items() if not is_category
    }
    own = {
        c.name: c.model_copy(
            update={"sites": {name: _newcomer_scale(c, numeric[c.name][cut.train], config)}, "absent": ()}
        )
        for c in columns
        if isinstance(c, NumberColumn)
    }
    mine = preparation.model_copy(update={"columns": tuple(own.get(c.name, c) for c in columns)})
    categorical = {c: table.columns[c].labels() for c, is_category in kinds.items() if is_category}
    notes: list[str] = []
    x = mine.encode(name, numeric, categorical, str(table.path), notes)
    if not is_class:
        y = target.standardise(y)
    return FederatedData(
        name=Path(config.path).stem or "folder",
        task=target.task,
        clients=(name,),
        train=stack_rows([x], [y], [cut.train]),
        val=stack_rows([x], [y], [cut.val]),
        test=stack_rows([x], [y], [cut.test]),
        outputs=len(target.classes) if is_class else 1,
        classes=target.classes,
        features=mine.features,
        notes=tuple(notes),
        preparation=mine,
    )


def _newcomer_scale(column: NumberColumn, train: Floats, config: FolderConfig) -> Scale:
    """A scale like those of the run, with the newcomer's median if it has values."""
    known = train[~np.isnan(train)]
    sites = list(column.sites.values())
    median = float(np.median(known)) if len(known) else float(np.median([s.median for s in sites]))
    if config.standardise == "none":
        return Scale(median=median)
    lows, highs = [s.low for s in sites if s.low is not None], [s.high for s in sites if s.high is not None]
    limits = {"low": min(lows), "high": max(highs)} if lows and highs else {}
    scale = Scale(median=median, mean=sites[0].mean, sd=sites[0].sd, **limits)
    if config.standardise == "pooled":
        return scale
    mean, sd = pooled_moments([np.where(np.isnan(train), median, scale.clip(train))])
    return scale.model_copy(update={"mean": mean, "sd": sd})
