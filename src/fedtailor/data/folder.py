"""Your own data: a folder with one CSV or Parquet file per client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.configs import FolderConfig
from fedtailor.data.federated import FederatedData
from fedtailor.data.tables import SUFFIXES, Column, Table, client_name, read_table
from fedtailor.data.tabular import Floats, Site, Target, assemble, sort_values
from fedtailor.errors import DataError, nearest

FEW = 20  # a target of text or whole numbers with at most so many distinct values is a class
MAX_CATEGORIES = 50


def load(config: FolderConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read all files of a folder, agree on columns and types, split and encode; `root` is not needed."""
    return _prepared(_read_folder(config.path.expanduser(), config.ignore), config, seed)


def load_newcomer(config: FolderConfig, path: Path, name: str, *, seed: int) -> FederatedData:
    """One more client, prepared as those of the folder are; they decide on columns, types, classes and scales."""
    if client_name(path) is None:
        raise DataError(f"{path}: not a file of data; the run reads {', '.join(SUFFIXES)}")
    tables = _read_folder(config.path.expanduser(), config.ignore)
    if name in tables:
        raise DataError(f'{tables[name].path}: "{name}" is a client of the run already; choose another name')
    return _prepared(tables, config, seed, {name: read_table(path, config.ignore)}).only([len(tables)])


def _prepared(
    tables: dict[str, Table], config: FolderConfig, seed: int, newcomers: dict[str, Table] | None = None
) -> FederatedData:
    columns = _common_columns(tables, config)
    target, targets, reason = _read_target(tables, config)
    kinds = {column: _is_categorical(tables, column, column in config.categorical) for column in columns}
    newcomers = newcomers or {}
    _fit_in(newcomers, config.target, kinds)
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
    )
    name = config.path.resolve().name or "folder"
    return assemble(
        name, sites, columns, target, config, config.standardise, seed=seed, notes=notes, newcomers=len(newcomers)
    )


def _fit_in(newcomers: dict[str, Table], target: str, kinds: dict[str, bool]) -> None:
    """Newcomers must have the columns of the others, and numbers where these have numbers."""
    for name, table in newcomers.items():
        for column in (target, *kinds):
            if column not in table.columns:
                raise DataError(
                    f'{table.path}: no column "{column}", which every client of the run has; '
                    f"{nearest(column, table.columns)}"
                )
        for column, is_categorical in kinds.items():
            if not is_categorical:
                report_text({name: table}, column, "remove the row")
        complete_target({name: table}, target)


def _target_of(table: Table, column: str, target: Target) -> NDArray[Any]:
    """A newcomer's target, as the others have it."""
    if target.task == "regression":
        report_text({"": table}, column, "remove the row")
        return numbers(table.columns[column])
    position = {label: i for i, label in enumerate(target.classes)}
    labels = [str(label) for label in table.columns[column].labels()]
    if unknown := [label for label in labels if label not in position]:
        raise DataError(
            f'{table.path}: target column "{column}" has the class "{unknown[0]}", which no client of the run has; '
            f"known: {', '.join(target.classes)}"
        )
    return np.array([position[label] for label in labels], dtype=np.int64)


def _read_folder(folder: Path, ignore: Sequence[str]) -> dict[str, Table]:
    """Tables by client name, sorted."""
    if not folder.is_dir():
        what = "is a file; give the folder that holds one file per client" if folder.exists() else "no such folder"
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
    if not any(c.is_text.any() for c in columns):
        return False
    _all_text(
        tables,
        column,
        f"treat the column as categories with data.categorical = ['{column}'] or leave it out with "
        f"data.ignore = ['{column}']",
    )
    distinct = {label for c in columns for label in c.labels()} - {None}
    if len(distinct) > MAX_CATEGORIES:
        raise DataError(
            f'{next(iter(tables.values())).path}: column "{column}" has {len(distinct)} distinct texts over all '
            f"files, more than {MAX_CATEGORIES}; leave it out with data.ignore = ['{column}'] or force it with "
            f"data.categorical = ['{column}']"
        )
    return True


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
    task, reason = (config.task, "as configured") if config.task != "auto" else _infer_task(tables, config.target)
    note = f'target "{config.target}": {task} ({reason})'
    if task == "regression":
        if any(c.is_text.any() for c in columns):
            report_text(tables, config.target, "set data.task = 'classification'")
        return Target("regression", standardise=config.standardise_target), [numbers(c) for c in columns], note
    labels = [c.labels() for c in columns]
    classes = sort_values(label for site in labels for label in site if label is not None)
    if len(classes) < 2:
        raise DataError(
            f'{config.path}: target column "{config.target}" has the single value "{classes[0]}" in all files; '
            "choose another with data.target"
        )
    position = {label: i for i, label in enumerate(classes)}
    codes = [np.array([position[str(label)] for label in site], dtype=np.int64) for site in labels]
    return Target("classification", tuple(classes)), codes, note


def _infer_task(tables: dict[str, Table], target: str) -> tuple[str, str]:
    columns = [table.columns[target] for table in tables.values()]
    has_text = any(c.is_text.any() for c in columns)
    if has_text:
        _all_text(tables, target, "set data.task = 'classification'")
    elif not all(((c.number % 1) == 0).all() for c in columns):
        return "regression", "inferred: its values are not whole numbers"
    distinct = len({label for c in columns for label in c.labels()})
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
    """A column as numbers, not a number where there is none."""
    return column.number.to_numpy().astype(np.float64)
