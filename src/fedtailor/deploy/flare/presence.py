"""When each site was last heard of, for operators."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedtailor.engines.wire import Header
from fedtailor.experiments.store import write_json

CONDITION = ("version", "now", "free", "certificate_ends")
PRESENCE_EVERY = 5.0  # seconds


class Presence:
    """When each site was last heard of, and how it is, in a file beside the run, for operators."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sites: dict[str, dict[str, Any]] = {}
        self._written = 0.0

    def greet(self, greetings: dict[str, Header]) -> None:
        """What sites say of themselves as a job begins; only what is known is kept of it."""
        now = time.time()
        for site, about in greetings.items():
            condition = about.pop("condition", None)
            known = condition if isinstance(condition, dict) else {}
            known = {k: v for k in CONDITION if isinstance(v := known.get(k), str | int | float)}
            self.sites[site] = known | {"asked": now, "seen": now}

    def note(self, away: dict[str, str]) -> None:
        """Who answered as a round began, and why others did not; written every few seconds."""
        now = time.time()
        for site, why in away.items():
            about = self.sites.setdefault(site, {})
            about["away"] = why[:200]
            if not why:
                about["seen"] = now
        if now - self._written > PRESENCE_EVERY:
            self._written = now
            write_json(self.path, self.sites)
