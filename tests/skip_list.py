"""Which tests were skipped and why, beside the list of reasons that are known."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("skips.toml")


def reason_of(report: Any) -> str:
    """Why a test was skipped, in its own words."""
    words = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(words).removeprefix("Skipped: ")


def is_there(what: dict[str, str]) -> bool:
    """Whether a program, a module or a variable is at hand."""
    found: dict[str, Callable[[str], object]] = {
        "program": shutil.which,
        "module": find_spec,
        "variable": os.environ.get,
    }
    return any(found[kind](name) for kind, name in what.items())


def unknown(reasons: Iterable[str], kept: list[dict[str, Any]]) -> list[str]:
    """Reasons that are not on the list, or do not hold on this machine."""
    allowed = [entry["reason"] for entry in kept if not is_there(entry.get("unless", {}))]
    return sorted({reason for reason in reasons if not any(reason.startswith(words) for words in allowed)})


def summary(reasons: list[str]) -> tuple[list[str], list[str]]:
    """Lines to print, and the reasons that fail the run."""
    wrong = unknown(reasons, tomllib.loads(KEPT.read_text(encoding="utf-8"))["skip"])
    lines = [
        f"{times:>5}  {why}{'  NOT ON THE LIST' if why in wrong else ''}" for why, times in Counter(reasons).items()
    ]
    return [f"{len(reasons)} tests skipped", *lines], wrong
