"""The page of a site's audit log: what left the site, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from fedtailor.flare.audit import RunRecord, inferences
from fedtailor.report.page import KeyFigure, Page, PageSection, PageTable, TableCell, cells, render_html
from fedtailor.version import __version__


def audit_html(site: str, records: Sequence[RunRecord], spent: str = "") -> str:
    """The page as HTML; `spent` describes the site's privacy budget."""
    footer = f"Made by fedtailor {__version__} from the site's own record."
    about = f"{len(records)} run{'s' if len(records) != 1 else ''}" + (f"; {spent}" if spent else "")
    return render_html(Page(f"What left {site}", "Audit", about, True, audit_sections(records), footer))


def audit_sections(records: Sequence[RunRecord]) -> tuple[PageSection, ...]:
    """What left in each run, and what could be concluded from it."""
    return tuple(map(_section, records))


def _section(record: RunRecord) -> PageSection:
    figures = (
        KeyFigure("Messages", f"{record.messages:,}", f"{record.first[:16]} to {record.last[:16]}"),
        KeyFigure("Rounds", f"{record.rounds:,}"),
        KeyFigure("Bytes that left", f"{record.left:,}"),
        KeyFigure("Refused", f"{sum(times for _, times in record.refused):,}"),
    )
    columns = ("asked for", "times", "bytes came", "bytes left", "last")
    rows = [
        (
            *cells(kind.name),
            TableCell(f"{kind.times:,}", kind.times),
            TableCell(f"{kind.came:,}", kind.came),
            TableCell(f"{kind.left:,}", kind.left),
            *cells(kind.shapes),
        )
        for kind in record.kinds
    ]
    refused = [(*cells(why), TableCell(f"{times:,}", times)) for why, times in record.refused]
    tables = [PageTable("Messages", columns, rows, words=True)]
    tables += [PageTable("Refused", ("why", "times"), refused, words=True)] if refused else []
    limited = [(*cells(why), TableCell(f"{times:,}", times)) for why, times in record.limited]
    tables += [PageTable("Limited replies", ("why", "times"), limited, words=True)] if limited else []
    words = tuple(f"Could be inferred: {inference}." for inference in inferences(record))
    return PageSection(f"run-{crc32(record.run.encode())}", record.run, words, figures, tables=tuple(tables))
