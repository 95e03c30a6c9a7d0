"""All that is wrong with the files of all sites, in one list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtailor.data.configs import FolderConfig
from fedtailor.data.files import expanded
from fedtailor.data.tabular.align import tidied
from fedtailor.data.tabular.columns import Table
from fedtailor.data.tabular.prepare import as_categories, common_columns, is_categorical, prepared
from fedtailor.data.tabular.read import files_of, read_sites, read_table
from fedtailor.data.tabular.target import read_target, report_text, with_target
from fedtailor.errors import DataError


def problems(config: FolderConfig) -> tuple[list[str], list[str]]:
    """What has to be put right, and what was noticed and needs nothing; files that cannot be read are left aside."""
    messages: list[str] = []

    def attempt(work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except DataError as error:
            if str(error) not in messages:
                messages.append(str(error))
            return None

    path = expanded(config.path)
    tables: dict[str, Table]
    if config.client_column is None and path.is_dir():
        files: dict[str, Path] = attempt(files_of, path) or {}
        tried = {name: attempt(read_table, file, config.ignore) for name, file in files.items()}
        tables = {name: table for name, table in tried.items() if table is not None}
    else:
        tables = attempt(read_sites, config) or {}
    if not tables:
        return messages, []
    tidy = tidied(tables, config)
    tables, config = tidy.tables, tidy.config
    without = [t for t in tables.values() if config.target not in t.columns]
    for table in without:
        attempt(common_columns, {"": table}, config.model_copy(update={"ignore": (), "categorical": ()}))
    tables = {name: t for name, t in tables.items() if config.target in t.columns}
    columns = dict.fromkeys(c for t in tables.values() for c in t.columns if c != config.target)
    for column in columns:
        with_column = {name: t for name, t in tables.items() if column in t.columns}
        if len(with_column) < len(tables):
            attempt(common_columns, tables, config.model_copy(update={"ignore": _others(columns, column, config)}))
        if column in config.ignore:
            continue
        before = len(messages)
        attempt(is_categorical, with_column, column, column in config.categorical)
        if len(messages) == before:
            continue
        for name, table in with_column.items():  # the same at other sites
            each = table.columns[column]
            if each.doubtful_date or each.doubtful_number:
                attempt(is_categorical, {name: table}, column, False)
            elif each.number.count():
                attempt(report_text, {name: table}, column, as_categories(column))
    targeted = attempt(with_target, tables, config) if tables else None
    if targeted is not None:
        attempt(read_target, targeted[0], config)
    if messages or not tables:
        return messages, list(tidy.notes)
    data = attempt(prepared, tables, config, 0)
    return messages, list(tidy.notes) if data is None else [*tidy.notes, *data.notes]


def _others(columns: dict[str, None], column: str, config: FolderConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(c for c in columns if c != column), *config.ignore]))
