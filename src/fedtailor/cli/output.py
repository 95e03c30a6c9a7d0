"""What commands print: tables in the terminal, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

NAME, TITLE = 20, 12  # widths that names and titles of columns keep where a table is too wide; they are folded
FRAME = 3  # width of the lines and blanks of a column

console = Console()


def progress_to_stderr(as_json: bool) -> AbstractContextManager[Any]:
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def print_json(value: Any) -> None:
    """Strict JSON: null where a number is not finite, text for paths."""
    print(json.dumps(_plain(value), indent=1, allow_nan=False, ensure_ascii=False, default=str))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def align_tables(lines: list[str]) -> list[str]:
    """Lines for a terminal: the cells of Markdown tables are aligned, and blank lines do not repeat."""
    out: list[str] = []
    table: list[list[str]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            table += [[cell.strip() for cell in line.strip("|").split("|")]] if not set(line) <= set("|-: ") else []
            continue
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        out += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        table = []
        if line or (out and out[-1]):
            out.append(line)
    return out[:-1] if out and not out[-1] else out


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], last: Sequence[str] = ()) -> None:
    """Print a table whose first column names the rows; columns that do not fit form further tables."""
    cells = [list(row) for row in (*rows, last) if row]
    room = console.width - 1
    widths = column_widths([list(columns), *cells])
    if framed_width(widths) > room:
        bodies = column_widths(cells)
        widths = [max(min(body, NAME), min(whole, TITLE)) for body, whole in zip(bodies, widths, strict=True)]
    for block in _blocks(widths, room):
        left = room - FRAME - framed_width([widths[i] for i in block])
        names = min(left, max(cell_len(row[0]) for row in [columns, *cells]))
        table = Table(title=escape(title), title_justify="left", header_style="bold")
        for i, width in ((0, max(names, widths[0])), *((i, widths[i]) for i in block)):
            table.add_column(escape(columns[i]), width=width, overflow="fold")
        for number, row in enumerate(cells):
            table.add_row(*(escape(row[i]) for i in (0, *block)), end_section=bool(last) and number == len(rows) - 1)
        console.print(table)


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def framed_width(widths: Sequence[int]) -> int:
    return sum(widths) + FRAME * len(widths)


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns after the first, as many side by side with it as there is room for."""
    blocks: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        if blocks[-1] and framed_width([widths[k] for k in (0, *blocks[-1], i)]) > room:
            blocks.append([])
        blocks[-1].append(i)
    return blocks


def unit(metric: str) -> str:
    return " %" if metric == "accuracy" else ""
