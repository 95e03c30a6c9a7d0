"""Read the target from the tables of all clients: classes, counts or numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from fedtailor.data.configs import FolderConfig
from fedtailor.data.tabular.align import is_mixed
from fedtailor.data.tabular.columns import ClientTable, Column
from fedtailor.data.tabular.encode import sort_values
from fedtailor.data.tabular.preparation import Floats, TargetColumn
from fedtailor.errors import DataError

FEW = 20  # a target of text or whole numbers with at most so many distinct values is a class
LARGEST = 1e100  # of a number to predict
MOST_COUNTED = 2**53  # above it whole numbers are not exact
COUNTED = 100.0  # mean of counts, above which they are treated as numbers
FEWEST_COUNTS = 5  # distinct whole numbers from 0 on that may be counts rather than classes
UNEVEN = 1.3  # rows of the most frequent value by those of the usual one: classes of equal size are no counts
CODES = (9, 99, 999, 9999)  # of what is not known
SKEWED = 2.0  # skewness of a long tail


def drop_unlabelled(
    tables: dict[str, ClientTable], config: FolderConfig
) -> tuple[dict[str, ClientTable], tuple[str, ...]]:
    """Leave out rows and sites without a target, with notes."""
    if config.target not in next(iter(tables.values())).columns:
        return tables, ()
    complete, left_out, rows = {}, [], 0
    for name, table in tables.items():
        has_target = table.columns[config.target].text.is_not_null()
        rows += table.rows - int(has_target.sum())
        if has_target.any():
            complete[name] = table if has_target.all() else table.only(has_target)
        else:
            left_out.append(name)
    if not complete:
        raise DataError(f'{config.path}: target column "{config.target}" has no value in any row; choose another')
    notes = [f'{rows} rows without a value of "{config.target}" are left out'] if rows else []
    notes += [f"left out, without any target: {', '.join(left_out)}"] if left_out else []
    return complete, tuple(notes)


def require_target(tables: Collection[ClientTable], target: str) -> None:
    """Refuse tables whose target is missing in some row."""
    for table in tables:
        gaps = table.columns[target].text.null_count()
        if gaps:
            raise DataError(
                f'{table.path}: target column "{target}" has no value in {gaps} of {table.rows} rows; '
                "remove or complete those rows"
            )


def read_target(tables: dict[str, ClientTable], config: FolderConfig) -> tuple[TargetColumn, list[NDArray[Any]], str]:
    """The target, its values for each client, and a note on why the task was chosen."""
    require_target(tables.values(), config.target)
    columns = [table.columns[config.target] for table in tables.values()]
    for table in tables.values():
        if table.columns[config.target].is_date:
            raise DataError(
                f'{table.path}: target column "{config.target}" has dates; make a number of them, such as the days '
                "until then, or choose another with data.target"
            )
    task: str = config.task
    reason = "as configured"
    if config.task == "auto":
        task, reason = _infer_task(tables.values(), config.target)
    note = f'target "{config.target}": {task} ({reason})'
    if config.target_scale == "log" and task != "regression":
        raise DataError(f"{config.path}: data.target_scale = 'log' is for numbers, and the target is read as {task}")
    if task in ("regression", "count"):
        if any(c.is_text.any() for c in columns):
            refuse_text(tables.values(), config.target, "set data.task = 'classification'")
        targets = [numeric_values(c) for c in columns]
        for table, y in zip(tables.values(), targets, strict=True):
            _check_numbers(table, config.target, y, task, config.target_scale == "log")
        if all((y == targets[0][0]).all() for y in targets):
            _refuse_constant(columns[0].text[0], config)
        hint = suggest_task(np.concatenate(targets)) if (config.task, config.target_scale) == ("auto", "plain") else ""
        is_log = config.target_scale == "log"
        target = TargetColumn(name=config.target, task="count" if task == "count" else "regression", is_log=is_log)
        return target, targets, note + hint + ("; log scale, predictions are medians" if is_log else "")
    classes = sort_values(distinct_labels(c.names() for c in columns))
    if len(classes) == 1:
        _refuse_constant(classes[0], config)
    target = TargetColumn(name=config.target, task="classification", classes=tuple(classes))
    hint = ""
    if config.task == "auto" and not any(c.is_text.any() for c in columns):
        hint = _counts_as_classes(columns) + _code_of_missing(columns)
    return target, [class_codes(c.names(), classes) for c in columns], note + hint


def _check_numbers(table: ClientTable, target: str, y: Floats, task: str, is_log: bool) -> None:
    """Refuse the first row whose number does not fit the task."""
    checks = [(np.abs(y) > LARGEST, "whose square is too large for a number", "give the target in other units")]
    if task == "count":
        no_count = (y < 0) | (y % 1 != 0) | (y > MOST_COUNTED)
        checks = [(no_count, "which is no count: 0, 1, 2, ...", "set data.task = 'regression'")]
    if is_log:
        checks.append((y <= 0, "which has no logarithm", "leave out data.target_scale"))
    for wrong, fault, remedy in checks:
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DataError(
                f'{table.path}: target column "{target}" has {y[row]:g} in {table.place(row)}, {fault}; correct it, or '
                f"{remedy}"
            )


def suggest_task(y: Floats) -> str:
    """Suggest a task or scale that may suit the numbers better, or nothing."""
    if (y >= 0).all() and (y % 1 == 0).all() and y.min() < FEWEST_COUNTS and y.mean() < COUNTED and skewness(y) > 0.5:
        return "; if these are counts, --task count fits rates (Poisson)"
    if (y > 0).all() and skewness(y) > SKEWED > abs(skewness(np.log(y))):
        return "; positive with a long tail: --target-scale log may fit it better"
    return ""


def skewness(y: Floats) -> float:
    """The third standardised moment; 0 for a constant."""
    sd = y.std()
    return float((((y - y.mean()) / sd) ** 3).mean()) if sd > 0 else 0.0


def _counts_as_classes(columns: Sequence[Column]) -> str:
    y = np.concatenate([numeric_values(c) for c in columns])
    values, rows = np.unique(y, return_counts=True)
    if len(values) > FEWEST_COUNTS and values[0] == 0 and values[1] == 1 and rows.max() > UNEVEN * rows.mean():
        return "; if these are counts, --task count fits rates (Poisson)"
    return ""


def _code_of_missing(columns: Sequence[Column]) -> str:
    """Classes 1, 2 and 9: the last one stands apart, as a code for what is not known does."""
    values = np.unique(np.concatenate([numeric_values(c) for c in columns]))
    is_apart = len(values) > 2 and values[-1] in CODES and values[-1] - values[-2] > values[-2] - values[0] + 1
    if not is_apart:
        return ""
    return f"; if {values[-1]:g} stands for a missing value, leave those cells empty"


def _refuse_constant(value: object, config: FolderConfig) -> None:
    raise DataError(
        f'{config.path}: target column "{config.target}" has the single value "{value}" in all files; '
        "choose another with data.target"
    )


def distinct_labels(labels: Iterable[pl.Series]) -> set[str]:
    return {label for series in labels for label in series.drop_nulls().unique().to_list()}


def class_codes(labels: pl.Series, classes: Sequence[str]) -> NDArray[np.int64]:
    return labels.replace_strict(list(classes), list(range(len(classes)))).to_numpy().astype(np.int64)


def _infer_task(tables: Collection[ClientTable], target: str) -> tuple[str, str]:
    columns = [table.columns[target] for table in tables]
    has_text = any(c.is_text.any() for c in columns)
    if has_text:
        if not is_mixed(tables, target):
            refuse_mixed_text(tables, target, "set data.task = 'classification'")
    elif not all(((c.number % 1) == 0).all() for c in columns):
        return "regression", "inferred: its values are not whole numbers"
    distinct = len(distinct_labels(c.names() for c in columns))
    kind = "texts" if has_text else "whole numbers"
    if distinct <= FEW:
        return "classification", f"inferred: {distinct} distinct {kind}, at most {FEW}"
    if has_text:
        raise DataError(
            f'{next(iter(tables)).path}: target column "{target}" has {distinct} distinct texts over all '
            f"files, more than {FEW}; if they are classes set data.task = 'classification', else choose another "
            "data.target"
        )
    return "regression", f"inferred: {distinct} distinct {kind}, more than {FEW}"


def refuse_mixed_text(tables: Collection[ClientTable], column: str, remedy: str) -> None:
    """Refuse text in a column that is numeric otherwise: entirely in some file, or mostly over all files."""
    text = sum(int(table.columns[column].is_text.sum()) for table in tables)
    values = sum(int(table.columns[column].text.is_not_null().sum()) for table in tables)
    numeric_file = any(
        table.columns[column].number.is_not_null().any() and not table.columns[column].is_text.any() for table in tables
    )
    if numeric_file or 2 * text < values:
        refuse_text(tables, column, remedy)


def refuse_text(tables: Collection[ClientTable], column: str, remedy: str) -> None:
    for table in tables:
        if table.columns[column].number.null_count() == table.columns[column].text.null_count():
            continue
        rows = table.columns[column].is_text.arg_true()
        if len(rows):
            row = int(rows[0])
            value = table.columns[column].text[row]
            raise DataError(
                f'{table.path}: column "{column}" has the text "{value}" in {table.place(row)} '
                f"where a number is expected; correct the value, or {remedy}"
            )


def numeric_values(column: Column) -> Floats:
    return column.number.to_numpy().astype(np.float64)


def newcomer_target(table: ClientTable, column: str, target: TargetColumn) -> NDArray[Any]:
    """A newcomer's target, encoded as in the run."""
    if target.task != "classification":
        refuse_text([table], column, "remove the row")
        y = numeric_values(table.columns[column])
        _check_numbers(table, column, y, target.task, target.is_log)
        return y
    position = {label: i for i, label in enumerate(target.classes)}
    forms = {label.casefold(): label for label in reversed(target.classes)}
    labels = table.columns[column].names()
    other = {label: forms.get(label.casefold(), label) for label in labels.unique().to_list() if label not in position}
    labels = labels.replace(other) if other else labels
    if unknown := [label for label in labels.unique(maintain_order=True).to_list() if label not in position]:
        raise DataError(
            f'{table.path}: target column "{column}" has the class "{unknown[0]}", which no client of the run has; '
            f"known: {', '.join(target.classes)}"
        )
    return class_codes(labels, target.classes)
