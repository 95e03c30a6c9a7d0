"""All problems of the files of all sites, in one list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtailor.data.configs import FolderConfig
from fedtailor.data.files import expand_home
from fedtailor.data.tabular.align import align_tables
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.prepare import category_remedy, common_columns, is_categorical, prepare_tables
from fedtailor.data.tabular.read import client_files, read_client_tables, read_table
from fedtailor.data.tabular.target import drop_unlabelled, read_target, refuse_text
from fedtailor.errors import DataError


def find_problems(config: FolderConfig) -> tuple[list[str], list[str]]:
    """Problems to correct, and notes that need no action; other files are checked even if one cannot be read."""
    messages: list[str] = []

    def attempt(work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except DataError as error:
            if str(error) not in messages:
                messages.append(str(error))
            return None

    path = expand_home(config.path)
    tables: dict[str, ClientTable]
    if config.client_column is None and path.is_dir():
        files: dict[str, Path] = attempt(client_files, path) or {}
        tried = {name: attempt(read_table, file, config.ignore) for name, file in files.items()}
        tables = {name: table for name, table in tried.items() if table is not None}
    else:
        tables = attempt(read_client_tables, config) or {}
    if not tables:
        return messages, []
    tidy = align_tables(tables, config)
    tables, config = tidy.tables, tidy.config
    without = [t for t in tables.values() if config.target not in t.columns]
    for table in without:
        attempt(common_columns, {"": table}, config.model_copy(update={"ignore": (), "categorical": ()}))
    tables = {name: t for name, t in tables.items() if config.target in t.columns}
    columns = dict.fromkeys(c for t in tables.values() for c in t.columns if c != config.target)
    for column in columns:
        with_column = {name: t for name, t in tables.items() if column in t.columns}
        if len(with_column) < len(tables):
            attempt(
                common_columns, tables, config.model_copy(update={"ignore": _other_columns(columns, column, config)})
            )
        if column in (*config.ignore, *config.categorical, *tidy.many):
            continue
        before = len(messages)
        attempt(is_categorical, with_column.values(), column)
        if len(messages) == before:
            continue
        for table in with_column.values():  # the same at other sites
            each = table.columns[column]
            if each.doubtful_date or each.doubtful_number:
                attempt(is_categorical, [table], column)
            elif each.number.count():
                attempt(refuse_text, [table], column, category_remedy(column))
    targeted = attempt(drop_unlabelled, tables, config) if tables else None
    if targeted is not None:
        attempt(read_target, targeted[0], config)
    if messages or not tables:
        return messages, list(tidy.notes)
    data = attempt(prepare_tables, tables, config, 0)
    return messages, list(tidy.notes) if data is None else [*tidy.notes, *data.notes]


def _other_columns(columns: dict[str, None], column: str, config: FolderConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*(c for c in columns if c != column), *config.ignore]))
