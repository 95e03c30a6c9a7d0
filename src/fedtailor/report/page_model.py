"""What a page is made of, before it is HTML: sections with words, figures, tables and charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Value = str | float | int | None


@dataclass(frozen=True)
class Chart:
    """Rows under named columns, and how to draw them; the rows are what can be downloaded."""

    id: str
    kind: str  # lines, dots, bars, heat, scatter, intervals: a function of charts.js
    title: str
    summary: str  # in words, for those who do not see it
    columns: tuple[str, ...]
    rows: Sequence[tuple[Value, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """For the page's script; no number is infinite or not a number."""
        rows = [[plain(v) for v in row] for row in self.rows]
        return {"id": self.id, "kind": self.kind, "columns": list(self.columns), "rows": rows, **self.options}


@dataclass(frozen=True)
class Cell:
    """Text in a table, and what it is sorted by."""

    text: str
    key: Value = None


@dataclass(frozen=True)
class Table:
    """The first column names the row; the others are numbers unless `words` says otherwise."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    sortable: bool = False
    words: bool = False
    folded: bool = False  # shown when asked for
    wraps: bool = False  # the last column, which is long


@dataclass(frozen=True)
class Figure:
    """One of the numbers at the top."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; a section with a reason to be `missing` is left out and named at the end."""

    id: str
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    code: tuple[tuple[str, str], ...] = ()  # what it is, and the text as it stands
    missing: str = ""
    tables_first: bool = False

    def without(self, why: str) -> Section:
        """This section, left out for a reason."""
        return replace(self, missing=why)


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    kind: str  # above the title: "Run" or "Comparison"
    state: str  # "finished", or how far it is
    finished: bool
    sections: tuple[Section, ...]
    footer: str  # last line


def plain(value: Value) -> Value:
    """Seven digits are what single precision has; None where there is no number."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None


def cells(*values: str | Cell) -> tuple[Cell, ...]:
    """A row of a table; text stands for itself."""
    return tuple(v if isinstance(v, Cell) else Cell(v, v) for v in values)
