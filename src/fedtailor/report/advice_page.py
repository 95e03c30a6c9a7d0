"""The page of `fedtailor advise`: expected gains, and a map of what each site's rows are worth to the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtailor.experiments.store import write_atomically
from fedtailor.report.formatting import count
from fedtailor.report.page import Chart, Page, PageSection, PageTable, TableCell, cells, render_html


def write_advice(record: Mapping[str, Any], folder: Path) -> None:
    """Write advice.json and advice.html."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(folder / "advice.json", f"{text}\n".encode())
    write_atomically(folder / "advice.html", render_html(advice_page(record)).encode())


def between(low: float, high: float) -> str:
    """An interval."""
    return f"{low:.3g} to {high:.3g}"


def advice_page(record: Mapping[str, Any]) -> Page:
    sections = [gains(record)]
    if "worth" in record:
        sections.append(worth_map(record["worth"]))
    footer = "From one exchange of sums; nothing was trained."
    return Page(f"Advice for {record['data']}", "Advice", "finished", True, tuple(sections), footer)


def gains(record: Mapping[str, Any]) -> PageSection:
    rows = [
        cells(
            name,
            TableCell(str(row["rows"]), row["rows"]),
            TableCell(f"{row['own_error']:.3g}", row["own_error"]),
            TableCell(f"{row['gain']:.3g}", row["gain"]),
            TableCell(between(row["low"], row["high"]), row["low"]),
            TableCell(f"{row['percent']['gain']:+.1f} %", row["percent"]["gain"]),
            row["verdict"],
        )
        for name, row in record["sites"].items()
    ]
    level = f"{100 * record['level']:g} %"
    columns = ("site", "rows", "error alone", "gain", level, "relative", "advice")
    text = (
        f"Expected squared error of new rows of {record['target']} by a site's own ridge regression, less that by the "
        f"mixed model. The {level} interval is for this expectation, not for the mean of some test rows.",
    )
    return PageSection("gains", "Should we share?", text, tables=(PageTable("Sites", columns, rows, sortable=True),))


def worth_map(worth: Mapping[str, Any]) -> PageSection:
    matrix: Mapping[str, Mapping[str, float]] = worth["worth"]
    rows = [(to, by, value) for to, row in matrix.items() for by, value in row.items()]
    most = max(worth["given"], key=lambda name: worth["given"][name])
    summary = f"Heat map of {count(len(matrix), 'site')}. The rows of {most} are worth most to the others."
    options = {"x": "leaves", "y": "site", "fill": "worth", "scale": "from zero", "low": "nothing", "high": "much"}
    columns = ("site", "leaves", "worth")
    chart = Chart("worth", "heat", "Worth of rows", summary, columns, rows, options | {"square": True})
    text = (
        "By how much the expected squared error of a site's new rows rises if another site leaves: the fit is computed "
        "again from the sums without it.",
    )
    return PageSection("worth", "Who brings what", text, charts=(chart,))
