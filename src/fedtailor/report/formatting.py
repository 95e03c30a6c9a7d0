"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedtailor.studies.result_tables import metric_name, number

MOST_ROUNDS = 1500  # points of a curve that a chart can show


def unit(metric: str) -> str:
    return "\u00a0%" if metric == "accuracy" else ""


def value(metric: str, x: float) -> str:
    return number(metric, x) + (unit(metric) if math.isfinite(x) else "")


def format_gain(metric: str, x: float) -> str:
    """A difference with its sign; of accuracies in percentage points."""
    if not math.isfinite(x):
        return "-"
    return f"{100 * x:+.2f}\u00a0points" if metric == "accuracy" else f"{x:+.4g}"


def count(n: int, noun: str) -> str:
    """Such as "1 client" or "3 clients"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def label(metric: str) -> str:
    return metric_name(metric) + (" (%)" if metric == "accuracy" else "")


def percent(metric: str, *columns: str) -> list[str]:
    """Those of the columns that are drawn in percent."""
    return list(columns) if metric == "accuracy" else []


def thin(rows: Sequence[Any], most: int = MOST_ROUNDS) -> list[Any]:
    """At most this many rows, evenly spaced, with the last."""
    step = -(-len(rows) // most) if rows else 1
    return [row for i, row in enumerate(rows) if (len(rows) - 1 - i) % step == 0]
