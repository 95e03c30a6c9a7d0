"""Your own data: a folder with one CSV or Parquet file per client, or one file with a column that names the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.samples import FederatedData
from fedtailor.data.configs import FolderConfig
from fedtailor.data.preparation import Floats
from fedtailor.data.tables import SUFFIXES, Column, Table, client_name, read_table, split_by
from fedtailor.data.tabular import Site, Target, assemble, sort_values
from fedtailor.errors import DataError, nearest

if TYPE_CHECKING:
    import polars as pl

FEW = 20  # a target of text or whole numbers with at most so many distinct values is a class
MAX_CATEGORIES = 50


def load(config: FolderConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read all files of a folder, agree on columns and types, split and encode; `root` is not needed."""
    return prepared(_read_sites(config), config, seed)


def load_newcomer(config: FolderConfig, path: Path, name: str, *, seed: int) -> FederatedData:
    """One more client, prepared as those of the folder are; they decide on columns, types, classes and scales."""
    if client_name(path) is None:
        raise DataError(f"{path}: not a file of data; the run reads {', '.join(SUFFIXES)}")
    tables = _read_sites(config)
    if name in tables:
        raise DataError(f'{tables[name].path}: "{name}" is a client of the run already; choose another name')
    return prepared(tables, config, seed, {name: read_table(path, config.ignore)}).only([len(tables)])


def prepared(
    tables: dict[str, Table], config: FolderConfig, seed: int, newcomers: dict[str, Table] | None = None
) -> FederatedData:
    """Agree on columns and types over the clients' tables, split and encode; newcomers have no say in that."""
    columns = _common_columns(tables, config)
    tables, left_out = _with_target(tables, config)
    target, targets, reason = _read_target(tables, config)
    kinds = {column: _is_categorical(tables, column, column in config.categorical) for column in columns}
    newcomers = newcomers or {}
    dates = [c for c in columns if not kinds[c] and any(t.columns[c].is_date for t in tables.values())]
    _fit_in(newcomers, config.target, kinds, dates)
    targets += [_target_of(table, config.target, target) for table in newcomers.values()]
    tables = tables | newcomers
    if config.missing == "error":
        _no_missing(tables, columns)
    sites = [
        Site(
            name=name,
            file=str(table.path),
            numeric={c: numbers(table.columns[c]) for c in columns if not kinds[c]},
            categorical={c: table.columns[c].labels() for c in columns if kinds[c]},
            y=y,
        )
        for (name, table), y in zip(tables.items(), targets, strict=True)
    ]
    categorical = [column for column in columns if kinds[column]]
    notes = (
        f"{len(sites)} clients from {config.path}: " + ", ".join(f"{site.name} {len(site.y)}" for site in sites),
        reason,
        f"{len(columns) - len(categorical)} numeric columns; categorical: {', '.join(categorical) or 'none'}",
        *left_out,
    )
    name = client_name(config.path) or config.path.resolve().name or "folder"
    return assemble(
        *(name, sites, columns, target, config, config.standardise),
        seed=seed,
        notes=notes,
        newcomers=len(newcomers),
        dates=dates,
    )


def _with_target(tables: dict[str, Table], config: FolderConfig) -> tuple[dict[str, Table], tuple[str, ...]]:
    """Rows and sites without a target are left out, and named."""
    if config.target not in next(iter(tables.values())).columns:
        return tables, ()
    kept, gone, rows = {}, [], 0
    for name, table in tables.items():
        there = table.columns[config.target].text.is_not_null()
        rows += table.rows - int(there.sum())
        if there.any():
            kept[name] = table if there.all() else table.only(there)
        else:
            gone.append(name)
    if not kept:
        raise DataError(f'{config.path}: target column "{config.target}" has no value in any row; choose another')
    notes = [f'{rows} rows without a value of "{config.target}" are left out'] if rows else []
    notes += [f"left out, without any target: {', '.join(gone)}"] if gone else []
    return kept, tuple(notes)


def _fit_in(newcomers: dict[str, Table], target: str, kinds: dict[str, bool], dates: Sequence[str]) -> None:
    """Newcomers must have the columns of the others, and numbers or dates where these have them."""
    for name, table in newcomers.items():
        for column in (target, *kinds):
            if column not in table.columns:
                raise DataError(
                    f'{table.path}: no column "{column}", which every client of the run has; '
                    f"{nearest(column, table.columns)}"
                )
        for column, is_categorical in kinds.items():
            if not is_categorical:
                check_numbers(table, column, is_date=column in dates)
        complete_target({name: table}, target)


def check_numbers(table: Table, column: str, is_date: bool) -> None:
    """A column of a file that comes later must hold numbers, or dates, as it did in the run."""
    found = table.columns[column]
    report_text({"": table}, column, "remove the row")
    if found.number.count() and found.is_date != is_date:
        was, now = ("dates", "numbers") if is_date else ("numbers", "dates")
        raise DataError(f'{table.path}: column "{column}" has {now}, in the run it had {was}; correct it')


def _target_of(table: Table, column: str, target: Target) -> NDArray[Any]:
    """A newcomer's target, as the others have it."""
    if target.task == "regression":
        report_text({"": table}, column, "remove the row")
        return numbers(table.columns[column])
    position = {label: i for i, label in enumerate(target.classes)}
    labels = table.columns[column].names()
    if unknown := [label for label in labels.unique(maintain_order=True).to_list() if label not in position]:
        raise DataError(
            f'{table.path}: target column "{column}" has the class "{unknown[0]}", which no client of the run has; '
            f"known: {', '.join(target.classes)}"
        )
    return _codes(labels, target.classes)


def _read_sites(config: FolderConfig) -> dict[str, Table]:
    path = config.path.expanduser()
    if config.client_column is None:
        return _read_folder(path, config.ignore)
    if not path.is_file():
        what = "a folder; data.client_column is for one file" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {what} that holds all clients")
    if client_name(path) is None:
        raise DataError(f"{path}: not a file of data; known endings: {', '.join(SUFFIXES)}")
    if config.client_column == config.target:
        raise DataError(f'{path}: "{config.target}" is both target and client column; choose another of them')
    return split_by(path, config.client_column, config.ignore)


def _read_folder(folder: Path, ignore: Sequence[str]) -> dict[str, Table]:
    """Tables by client name, sorted."""
    if not folder.is_dir():
        one = "is a file; give the folder that holds one file per client, or name its column with data.client_column"
        what = one if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {what}")
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
    return {name: read_table(files[name], ignore) for name in sorted(files)}


def _common_columns(tables: dict[str, Table], config: FolderConfig) -> list[str]:
    """Feature columns, in the first file's order; every file must have all of them and the target."""
    known = list(dict.fromkeys(column for table in tables.values() for column in table.names))
    for option, names in (("ignore", config.ignore), ("categorical", config.categorical)):
        for name in names:
            if name not in known:
                raise DataError(
                    f"{config.path}: data.{option} = ['{name}']: no file has this column; {nearest(name, known)}"
                )
    if config.target in config.ignore:
        raise DataError(
            f"{config.path}: data.ignore = ['{config.target}']: this is the target; choose another with data.target"
        )
    for table in tables.values():
        if config.target not in table.columns:
            if len(table.names) == 1:
                raise DataError(
                    f'{table.path}: no target column "{config.target}", but a single one, "{table.names[0]}"; '
                    "separate columns by comma, semicolon, tab or |"
                )
            raise DataError(
                f'{table.path}: no target column "{config.target}"; {nearest(config.target, table.columns)}'
            )
    columns = [c for c in known if c != config.target and c not in config.ignore]
    if not columns:
        raise DataError(f'{config.path}: no columns left to predict "{config.target}" from')
    for column in columns:
        owner = next(table.path.name for table in tables.values() if column in table.columns)
        for table in tables.values():
            if column not in table.columns:
                raise DataError(
                    f'{table.path}: column "{column}" is missing ({owner} has it); add it or leave it out '
                    f"everywhere with data.ignore = ['{column}']"
                )
    return columns


def _is_categorical(tables: dict[str, Table], column: str, forced: bool) -> bool:
    """Whether a feature column is categorical; text among numbers is an error."""
    if forced:
        return True
    columns = [table.columns[column] for table in tables.values()]
    remedy = f"leave it out with data.ignore = ['{column}']"
    for table in tables.values():
        if (value := table.columns[column].doubtful_date) is not None:
            raise DataError(
                f'{table.path}: column "{column}" has dates such as "{value}", where day and month can be mistaken; '
                f"write them as 2024-01-31, or {remedy}"
            )
    if not any(c.is_text.any() for c in columns):
        _dates_everywhere(tables, column, remedy)
        return False
    _all_text(
        tables,
        column,
        f"treat the column as categories with data.categorical = ['{column}'] or leave it out with "
        f"data.ignore = ['{column}']",
    )
    distinct = _distinct(c.labels() for c in columns)
    if len(distinct) > MAX_CATEGORIES:
        raise DataError(
            f'{next(iter(tables.values())).path}: column "{column}" has {len(distinct)} distinct texts over all '
            f"files, more than {MAX_CATEGORIES}; leave it out with data.ignore = ['{column}'] or force it with "
            f"data.categorical = ['{column}']"
        )
    return True


def _dates_everywhere(tables: dict[str, Table], column: str, remedy: str) -> None:
    """Fail if a column has dates in one file and plain numbers in another."""
    filled = {table.path: table.columns[column] for table in tables.values() if table.columns[column].number.count()}
    kinds = {c.is_date: path for path, c in filled.items()}
    if len(kinds) == 2:
        raise DataError(
            f'{kinds[False]}: column "{column}" has numbers, but dates in {kinds[True].name}; correct it, or {remedy}'
        )


def _all_text(tables: dict[str, Table], column: str, remedy: str) -> None:
    """Fail if a column that has text is otherwise numeric: at some file entirely, or mostly over all files."""
    text = sum(int(table.columns[column].is_text.sum()) for table in tables.values())
    values = sum(int(table.columns[column].text.is_not_null().sum()) for table in tables.values())
    numeric_file = any(
        table.columns[column].number.is_not_null().any() and not table.columns[column].is_text.any()
        for table in tables.values()
    )
    if numeric_file or 2 * text < values:
        report_text(tables, column, remedy)


def report_text(tables: dict[str, Table], column: str, remedy: str) -> None:
    """Fail if a column of numbers has text somewhere."""
    for table in tables.values():
        rows = table.columns[column].is_text.arg_true()
        if len(rows):
            row = int(rows[0])
            value = table.columns[column].text[row]
            raise DataError(
                f'{table.path}: column "{column}" has the text "{value}" in data row {row + 1} '
                f"where a number is expected; correct the value, or {remedy}"
            )


def _no_missing(tables: dict[str, Table], columns: Sequence[str]) -> None:
    for table in tables.values():
        for column in columns:
            gaps = table.columns[column].text.null_count()
            if gaps:
                raise DataError(
                    f'{table.path}: column "{column}" has no value in {gaps} of {table.rows} rows; '
                    f"drop it with data.ignore = ['{column}'] or impute with data.missing = 'median'"
                )


def complete_target(tables: dict[str, Table], target: str) -> None:
    """Fail if the target is missing in some row."""
    for table in tables.values():
        gaps = table.columns[target].text.null_count()
        if gaps:
            raise DataError(
                f'{table.path}: target column "{target}" has no value in {gaps} of {table.rows} rows; '
                "remove or complete those rows"
            )


def _read_target(tables: dict[str, Table], config: FolderConfig) -> tuple[Target, list[NDArray[Any]], str]:
    """Task, targets of each client, and why the task was chosen."""
    complete_target(tables, config.target)
    columns = [table.columns[config.target] for table in tables.values()]
    for table in tables.values():
        if table.columns[config.target].is_date:
            raise DataError(
                f'{table.path}: target column "{config.target}" has dates; make a number of them, such as the days '
                "until then, or choose another with data.target"
            )
    task, reason = (config.task, "as configured") if config.task != "auto" else _infer_task(tables, config.target)
    note = f'target "{config.target}": {task} ({reason})'
    if task == "regression":
        if any(c.is_text.any() for c in columns):
            report_text(tables, config.target, "set data.task = 'classification'")
        targets = [numbers(c) for c in columns]
        if all((y == targets[0][0]).all() for y in targets):
            _refuse_constant(columns[0].text[0], config)
        return Target("regression", standardise=config.standardise_target, name=config.target), targets, note
    classes = sort_values(_distinct(c.names() for c in columns))
    if len(classes) == 1:
        _refuse_constant(classes[0], config)
    made = Target("classification", tuple(classes), name=config.target)
    return made, [_codes(c.names(), classes) for c in columns], note


def _refuse_constant(value: object, config: FolderConfig) -> None:
    raise DataError(
        f'{config.path}: target column "{config.target}" has the single value "{value}" in all files; '
        "choose another with data.target"
    )


def _distinct(labels: Iterable[pl.Series]) -> set[str]:
    return {label for series in labels for label in series.drop_nulls().unique().to_list()}


def _codes(labels: pl.Series, classes: Sequence[str]) -> NDArray[np.int64]:
    return labels.replace_strict(list(classes), list(range(len(classes)))).to_numpy().astype(np.int64)


def _infer_task(tables: dict[str, Table], target: str) -> tuple[str, str]:
    columns = [table.columns[target] for table in tables.values()]
    has_text = any(c.is_text.any() for c in columns)
    if has_text:
        _all_text(tables, target, "set data.task = 'classification'")
    elif not all(((c.number % 1) == 0).all() for c in columns):
        return "regression", "inferred: its values are not whole numbers"
    distinct = len(_distinct(c.names() for c in columns))
    what = "texts" if has_text else "whole numbers"
    if distinct <= FEW:
        return "classification", f"inferred: {distinct} distinct {what}, at most {FEW}"
    if has_text:
        raise DataError(
            f'{next(iter(tables.values())).path}: target column "{target}" has {distinct} distinct texts over all '
            f"files, more than {FEW}; if they are classes set data.task = 'classification', else choose another "
            "data.target"
        )
    return "regression", f"inferred: {distinct} distinct {what}, more than {FEW}"


def numbers(column: Column) -> Floats:
    """Values with NaN where there is none."""
    return column.number.to_numpy().astype(np.float64)
