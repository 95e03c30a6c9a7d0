"""What a site has sent and computed today and in all, over all runs; beyond its quotas it answers nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedtailor.experiments.store import read_json, write_json
from fedtailor.flare.protocol import Refused

if TYPE_CHECKING:
    from fedtailor.flare.policy import Budget

USED = "used.json"  # in the site's own folder
WRITE_EVERY = 2.0  # seconds: what a killed site forgets to count
MEGABYTE, HOUR = 10**6, 3600.0


class SiteQuotas:
    """Bytes that left and seconds of computing, by day."""

    def __init__(self, budget: Budget, folder: Path) -> None:
        self.budget = budget
        self.path = folder / USED
        self._written = 0.0
        self.days: dict[str, list[float]] | None = None  # read with the first request, which a damaged file refuses
        self.before: list[float] = [0, 0.0]  # all days but the last

    def read(self) -> None:
        """Go on from what the file says."""
        content = dict(read_json(self.path)) if self.path.exists() else {}
        self.before = list(content.get("before", self.before))
        self.days = {day: list(used) for day, used in content.get("days", {}).items()}

    @property
    def today(self) -> list[float]:
        """Bytes and seconds of this day."""
        if self.days is None:
            self.read()
        assert self.days is not None
        day = datetime.now(UTC).date().isoformat()
        if day not in self.days:
            for used in self.days.values():
                self.before = [a + b for a, b in zip(self.before, used, strict=True)]
            self.days = {day: [0, 0.0]}
        return self.days[day]

    def check(self) -> None:
        """Refuse a request where a quota is spent."""
        today, budget = self.today, self.budget
        in_all = [a + b for a, b in zip(self.before, today, strict=True)]
        for spent, unit, per_day, ever, name in (
            (0, MEGABYTE, budget.megabytes_per_day, budget.megabytes_in_all, "megabytes"),
            (1, HOUR, budget.hours_per_day, budget.hours_in_all, "hours"),
        ):
            for used, most, when in ((today[spent], per_day, "today"), (in_all[spent], ever, "in all")):
                if used / unit >= most:
                    raise Refused(f"the policy's {most:g} {name} {when} are spent")
        if budget.memory_mb and (size := memory_of_this_process() / 2**20) > budget.memory_mb:
            raise Refused(f"this site's process needs {size:.0f} MB, more than the policy's {budget.memory_mb}")

    @contextmanager
    def computing(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.today[1] += time.perf_counter() - begun

    def count(self, left: int) -> None:
        """Count the bytes of a reply; written now and then."""
        self.today[0] += left
        if time.monotonic() - self._written > WRITE_EVERY:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        write_json(self.path, {"days": self.days, "before": self.before})


def memory_of_this_process() -> int:
    """Bytes that are in memory."""
    import psutil

    return int(psutil.Process().memory_info().rss)
