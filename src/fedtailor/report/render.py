"""From the content of a page to one self-contained HTML file that works offline."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fedtailor.report.page_model import Chart, Page
from fedtailor.version import __version__

VENDOR = ("d3-7.9.2.min.js", "plot-0.6.17.min.js")


def html(page: Page, live: bool = False) -> str:
    """The page; a live one asks its server every few seconds whether there is news."""
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
    """How many charts stand side by side where there is room."""
    small = all(chart.options.get("small") for chart in charts)
    return " three" if small and len(charts) > 2 else " two" if small or len(charts) > 1 else ""


def embedded(charts: list[Chart]) -> Markup:
    """JSON that cannot end the script element it stands in, whatever clients are called."""
    text = json.dumps([chart.plain() for chart in charts], allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def policy(live: bool) -> str:
    """Only the scripts below run, and nothing is fetched; but a live page may ask where it came from."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts())
    network = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; {network}"
        "base-uri 'none'; form-action 'none'"
    )


@cache
def scripts() -> tuple[str, ...]:
    """d3 and Plot as they are published, and ours."""
    return *(_text("vendor", name) for name in VENDOR), _text("templates", "charts.js")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _text(*path: str) -> str:
    return files("fedtailor.report").joinpath(*path).read_text(encoding="utf-8")
