"""Prepare the tables of all clients: common columns, their types and the target; then split and encode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import polars as pl

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import FolderConfig
from fedtailor.data.files import client_name
from fedtailor.data.tabular.align import MAX_CATEGORIES, align_tables, match_columns, refuse_other_units
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.earlier_rows import EarlierRows
from fedtailor.data.tabular.encode import SiteColumns, encode_sites
from fedtailor.data.tabular.target import (
    distinct_labels,
    drop_unlabelled,
    newcomer_target,
    numeric_values,
    read_target,
    refuse_mixed_text,
    refuse_text,
    require_target,
)
from fedtailor.errors import DataError, nearest

MANY_VALUES = 0.9  # distinct values of a column by distinct rows, from which on rows do not repeat by chance


def prepare_tables(
    tables: dict[str, ClientTable],
    config: FolderConfig,
    seed: int,
    newcomers: dict[str, ClientTable] | None = None,
    earlier: EarlierRows | None = None,
) -> FederatedData:
    """Determine columns and types over the clients' tables but not the newcomers', then split and encode all.

    `earlier` are the rows that a fit knows already, and how it prepared them.
    """
    tidy = align_tables(tables, config)
    tables, config = tidy.tables, tidy.config
    columns = common_columns(tables, config)
    tables, left_out = drop_unlabelled(tables, config)
    target, targets, reason = read_target(tables, config)
    forced = (*config.categorical, *tidy.many)
    kinds = {column: column in forced or is_categorical(tables.values(), column) for column in columns}
    newcomers = {
        name: rename_columns(table, (config.target, *columns)).in_order(tidy.orders)
        for name, table in (newcomers or {}).items()
    }
    with_dates = (c for c in columns if not kinds[c] and any(t.columns[c].is_date for t in tables.values()))
    dates = {c: tidy.orders.get(c, "") for c in with_dates}
    for table in newcomers.values():
        check_newcomer(table, config.target, kinds, tuple(dates))
    targets += [newcomer_target(table, config.target, target) for table in newcomers.values()]
    tables = tables | newcomers
    if config.missing == "error":
        _refuse_missing(tables, columns)
    sites = [
        SiteColumns(
            name=name,
            file=str(table.path),
            numeric={c: numeric_values(table.columns[c].of_kind(c in dates)) for c in columns if not kinds[c]},
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
        *tidy.notes,
        *_note_repeats(tables, [*columns, config.target]),
        *_note_sampling(sites, config),
    )
    name = client_name(config.path) or config.path.resolve().name or "folder"
    return encode_sites(
        *(name, sites, columns, target, config, config.standardise),
        seed=seed,
        standardise_target=config.standardise_target,
        notes=notes,
        newcomers=len(newcomers),
        dates=dates,
        absent=tidy.absent,
        earlier=earlier,
        many=tidy.many,
    )


def rename_columns(table: ClientTable, columns: Sequence[str]) -> ClientTable:
    new = match_columns(table.names, columns)
    names = tuple(new.get(name, name) for name in table.names)
    return replace(table, names=names, columns={new.get(name, name): c for name, c in table.columns.items()})


def _note_repeats(tables: dict[str, ClientTable], columns: Sequence[str]) -> list[str]:
    """Rows of a site that are there twice, where a column of many values makes that no chance."""
    places, count = [], 0
    for table in tables.values():
        if any(table.columns[name].text.n_unique() == table.rows for name in columns):
            continue
        frame = pl.DataFrame({name: table.columns[name].text for name in columns})
        is_first = frame.select(pl.struct(pl.all()).is_first_distinct()).to_series()
        again = (~is_first).arg_true().to_list()
        if not again or max(series.n_unique() for series in frame) < MANY_VALUES * int(is_first.sum()):
            continue
        count += len(again)
        places += [f"{table.path.name}, {table.place(row)}" for row in again[:3]]
    if not count:
        return []
    more = ", ..." if count > len(places[:5]) else ""
    return [
        f"{count} rows repeat an earlier one of their site in every column and are counted again: "
        f"{'; '.join(places[:5])}{more}; remove them if they were entered twice"
    ]


def _note_sampling(sites: Sequence[SiteColumns], config: FolderConfig) -> list[str]:
    most = config.max_samples
    large = [site for site in sites if most is not None and len(site.y) > most]
    if not large or most is None:
        return []
    which = ", ".join(f"{site.name} ({len(site.y):,} rows)" for site in large[:3])
    more = f" and {len(large) - 3} more sites" if len(large) > 3 else ""
    return [
        f"NOT ALL ROWS ARE USED: {most:,} drawn at random at {which}{more}; "
        f"to use all: data.max_samples = {max(len(site.y) for site in large)}"
    ]


def check_newcomer(table: ClientTable, target: str, kinds: dict[str, bool], dates: Sequence[str]) -> None:
    """A newcomer must have the columns of the others, with numbers or dates where they have them."""
    for column in (target, *kinds):
        if column not in table.columns:
            raise DataError(
                f'{table.path}: no column "{column}", which every client of the run has; '
                f"{nearest(column, table.columns)}"
            )
    for column, is_category in kinds.items():
        if not is_category:
            check_column(table, column, is_date=column in dates)
    require_target([table], target)


def check_column(table: ClientTable, column: str, is_date: bool) -> None:
    """Check that a column of a new file has numbers or dates, as it had in the run."""
    values = table.columns[column].of_kind(is_date)
    refuse_text([table], column, "remove the row")
    if values.number.count() and values.is_date != is_date:
        was, now = ("dates", "numbers") if is_date else ("numbers", "dates")
        raise DataError(f'{table.path}: column "{column}" has {now}, in the run it had {was}; correct it')


def common_columns(tables: dict[str, ClientTable], config: FolderConfig) -> list[str]:
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


def is_categorical(tables: Collection[ClientTable], column: str) -> bool:
    """Whether a feature column is categorical; text among numbers is an error."""
    columns = [table.columns[column] for table in tables]
    remedy = f"leave it out with data.ignore = ['{column}']"
    for table in tables:
        if (value := table.columns[column].doubtful_date) is not None:
            raise DataError(
                f'{table.path}: column "{column}" has dates such as "{value}", where day and month can be mistaken; '
                f"write them as 2024-01-31, or {remedy}"
            )
        if (row := table.columns[column].bare_year) is not None:
            raise DataError(
                f'{table.path}: column "{column}" has dates, and in {table.place(row)} the year '
                f'"{table.columns[column].text[row]}" alone; write a whole date or leave the cell empty, or {remedy}'
            )
        if (value := table.columns[column].doubtful_number) is not None:
            raise DataError(
                f'{table.path}: column "{column}" has numbers such as "{value}", which may be thousands or decimals; '
                f"write them as {value.replace(',', '')} or {value.replace(',', '.')}, or {remedy}"
            )
    if not any(c.is_text.any() for c in columns):
        _require_dates_everywhere(tables, column, remedy)
        refuse_other_units(tables, column)
        return False
    refuse_mixed_text(tables, column, category_remedy(column))
    distinct = distinct_labels(c.labels() for c in columns)
    if len(distinct) > MAX_CATEGORIES:
        raise DataError(
            f'{next(iter(tables)).path}: column "{column}" has {len(distinct)} distinct texts over all '
            f"files, more than {MAX_CATEGORIES}; leave it out with data.ignore = ['{column}'] or force it with "
            f"data.categorical = ['{column}']"
        )
    return True


def category_remedy(column: str) -> str:
    """Advice on a column of numbers and texts, for messages."""
    return (
        f"treat the column as categories with data.categorical = ['{column}'] or leave it out with "
        f"data.ignore = ['{column}']"
    )


def _require_dates_everywhere(tables: Collection[ClientTable], column: str, remedy: str) -> None:
    """Refuse a column with dates in one file and numbers in another."""
    filled = {table.path: table.columns[column] for table in tables if table.columns[column].number.count()}
    kinds = {c.is_date: path for path, c in filled.items()}
    if len(kinds) == 2:
        raise DataError(
            f'{kinds[False]}: column "{column}" has numbers, but dates in {kinds[True].name}; correct it, or {remedy}'
        )


def _refuse_missing(tables: dict[str, ClientTable], columns: Sequence[str]) -> None:
    for table in tables.values():
        for column in columns:
            gaps = table.columns[column].text.null_count()
            if gaps:
                raise DataError(
                    f'{table.path}: column "{column}" has no value in {gaps} of {table.rows} rows; '
                    f"drop it with data.ignore = ['{column}'] or impute with data.missing = 'median'"
                )
