"""A site's record as a page: what left, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from fedtailor.flare.audit import RunRecord, inferred
from fedtailor.report.page_model import Cell, Figure, Page, Section, Table, cells
from fedtailor.report.render import html
from fedtailor.version import __version__


def audit_html(site: str, records: Sequence[RunRecord], spent: str = "") -> str:
    """One self-contained page; `spent` is what the site's privacy budget says."""
    footer = f"Made by fedtailor {__version__} from the site's own record."
    about = f"{len(records)} run{'s' if len(records) != 1 else ''}" + (f"; {spent}" if spent else "")
    return html(Page(f"What left {site}", "Audit", about, True, tuple(map(_section, records)), footer))


def _section(record: RunRecord) -> Section:
    figures = (
        Figure("Messages", f"{record.messages:,}", f"{record.first[:16]} to {record.last[:16]}"),
        Figure("Rounds", f"{record.rounds:,}"),
        Figure("Bytes that left", f"{record.left:,}"),
        Figure("Refused", f"{sum(times for _, times in record.refused):,}"),
    )
    columns = ("asked for", "times", "bytes came", "bytes left", "last")
    rows = [
        (
            *cells(kind.name),
            Cell(f"{kind.times:,}", kind.times),
            Cell(f"{kind.came:,}", kind.came),
            Cell(f"{kind.left:,}", kind.left),
            *cells(kind.shapes),
        )
        for kind in record.kinds
    ]
    refused = [(*cells(why), Cell(f"{times:,}", times)) for why, times in record.refused]
    tables = [Table("Messages", columns, rows, words=True)]
    tables += [Table("Refused", ("why", "times"), refused, words=True)] if refused else []
    words = tuple(f"Could be inferred: {inference}." for inference in inferred(record))
    return Section(f"run-{crc32(record.run.encode())}", record.run, words, figures, tables=tuple(tables))
