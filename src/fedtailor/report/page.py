"""What a page is made of, and its HTML: one self-contained file that works offline."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fedtailor.version import __version__

Value = str | float | int | None
VENDOR = ("d3-7.9.2.min.js", "plot-0.6.17.min.js")


@dataclass(frozen=True)
class Chart:
    """Rows under named columns, which can be downloaded, and how to draw them."""

    id: str
    kind: str  # lines, dots, bars, heat, scatter, intervals: a function of charts.js
    title: str
    summary: str  # in words, for screen readers
    columns: tuple[str, ...]
    rows: Sequence[tuple[Value, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """For the page's script; no number is infinite or not a number."""
        digits = 7 if len(self.rows) <= MANY_ROWS else 5  # no chart shows more
        rows = [[plain(v, digits) for v in row] for row in self.rows]
        return {"id": self.id, "kind": self.kind, "columns": list(self.columns), "rows": rows, **self.options}


MANY_ROWS = 500  # of a chart
SHOWN = 1e-3  # of a number by which its text may differ: thousands of sites would fill a page with digits


@dataclass(frozen=True)
class TableCell:
    text: str
    key: Value = None

    @property
    def sort_key(self) -> str | None:
        """What the cell is sorted by; None where its text does."""
        value = plain(self.key)
        if isinstance(value, float):
            try:
                if math.isclose(float(self.text), value, rel_tol=SHOWN):
                    return None
            except ValueError:
                pass  # a text with a unit or a sign of its own
        key = "" if value is None else str(value)
        return None if key == self.text else key


@dataclass(frozen=True)
class PageTable:
    """The first column names the row; the others are numbers unless `words` says otherwise."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[TableCell, ...]]
    sortable: bool = False
    words: bool = False
    folded: bool = False  # shown on click
    wraps: bool = False  # of the last column, which is long


@dataclass(frozen=True)
class KeyFigure:
    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """An image that the page holds itself."""

    title: str
    uri: str  # data:image/png;base64,...
    summary: str  # in words, for screen readers


@dataclass(frozen=True)
class PageSection:
    """A heading and its content; a section with a reason to be `missing` is left out and named at the end."""

    id: str
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[KeyFigure, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[PageTable, ...] = ()
    code: tuple[tuple[str, str], ...] = ()  # title and text
    missing: str = ""
    tables_first: bool = False
    pictures: tuple[Picture, ...] = ()

    def without(self, why: str) -> PageSection:
        return replace(self, missing=why)


@dataclass(frozen=True)
class Page:
    title: str
    kind: str  # above the title: "Run" or "Comparison"
    state: str  # "finished", or how far it is
    finished: bool
    sections: tuple[PageSection, ...]
    footer: str  # last line


def plain(value: Value, digits: int = 7) -> Value:
    """Rounded, by default as of single precision; None for inf and nan."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def cells(*values: str | TableCell) -> tuple[TableCell, ...]:
    """A row of a table; text is sorted as text."""
    return tuple(v if isinstance(v, TableCell) else TableCell(v, v) for v in values)


def render_html(page: Page, live: bool = False) -> str:
    """The page as HTML; a `live` one asks its server every few seconds whether it has changed."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    shown = [section for section in page.sections if not section.missing]
    return environment.from_string(_text("templates", "page.html.j2")).render(
        page=page,
        shown=shown,
        missing=[section for section in page.sections if section.missing],
        data=embedded([chart for section in shown for chart in section.charts]),
        style=Markup(_text("templates", "style.css")),
        scripts=[Markup(script) for script in scripts()],
        policy=policy(live),
        live=live,
        layout=layout,
        version=__version__,
    )


def layout(charts: Sequence[Chart]) -> str:
    """CSS class by how many charts fit side by side."""
    small = all(chart.options.get("small") for chart in charts)
    return " three" if small and len(charts) > 2 else " two" if small or len(charts) > 1 else ""


def embedded(charts: list[Chart]) -> Markup:
    """JSON that cannot end its script element, whatever clients are called."""
    text = json.dumps([chart.plain() for chart in charts], allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def policy(live: bool) -> str:
    """Content security policy: only our scripts run and nothing is fetched, but by a live page from its server."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts())
    network = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; {network}"
        "base-uri 'none'; form-action 'none'"
    )


@cache
def scripts() -> tuple[str, ...]:
    """d3 and Plot as published, and ours."""
    return *(_text("vendor", name) for name in VENDOR), _text("templates", "charts.js")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _text(*path: str) -> str:
    return files("fedtailor.report").joinpath(*path).read_text(encoding="utf-8")
