"""Text for tables that people open in a spreadsheet, which takes some text for a formula and runs it."""

from __future__ import annotations

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_text(value: str) -> str:
    """A name as it may stand in a CSV file: one that would be a formula gets a quote before it; numbers stay."""
    if not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
