"""Tables of results, for a terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from fedtailor.runs.compare import Row

COLUMNS = ("algorithm", "test {}", "selected", "client std", "worst tenth", "hurt", "up", "down", "trips", "seconds")
ESSENTIAL = ("algorithm", "test {}", "selected", "worst tenth", "hurt", "up", "seconds")  # fit 80 columns


def cells_of(row: Row) -> list[str]:
    """The figures of a row as text."""
    return [
        row.label,
        spread(row.metric, *row.last),
        spread(row.metric, *row.selected),
        number(row.metric, row.client_std),
        number(row.metric, row.worst_tenth),
        "-" if math.isnan(row.hurt) else f"{100 * row.hurt:.0f} %",
        size(row.up),
        size(row.down),
        f"{row.trips:.0f}",
        f"{row.seconds:.1f}",
    ]


def header(rows: Sequence[Row]) -> list[str]:
    """Column titles."""
    name = rows[0].metric + (" %" if rows[0].metric == "accuracy" else "")
    return [title.format(name) for title in COLUMNS]


def terminal(rows: Sequence[Row], title: str) -> Table:
    """The essential columns, as rich draws them."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown = [COLUMNS.index(name) for name in ESSENTIAL]
    titles = header(rows)
    table.add_column(titles[0])  # a long label is wrapped; figures never are
    for i in shown[1:]:
        title = titles[i].replace(" ", "\n", 1)
        widest = max(len(text) for text in [*title.splitlines(), *(cells_of(row)[i] for row in rows)])
        table.add_column(title, justify="right", no_wrap=True, min_width=widest)
    for row in rows:
        cells = cells_of(row)
        table.add_row(*(cells[i] for i in shown))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(header(rows)) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(cells_of(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(metric: str, value: float) -> str:
    """Accuracies in percent, other metrics as they are."""
    if math.isnan(value):
        return "-"
    return f"{100 * value:.2f}" if metric == "accuracy" else f"{value:.4g}"


def spread(metric: str, value: float, deviation: float) -> str:
    """Mean and, with several seeds, spread."""
    return number(metric, value) + ("" if math.isnan(deviation) else f" ± {number(metric, deviation)}")


def size(bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if bytes < 1000:
            return f"{bytes:.0f} {unit}" if unit == "B" else f"{bytes:.1f} {unit}"
        bytes /= 1000
    return f"{bytes:.2f} GB"
