"""`threading.Timer` for many at once: one thread waits for all of them.

FLARE 2.9 keeps what it knows of a received stream for a minute, and starts a thread for each that sleeps so long: at
forty replies a second, 2,600 threads.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any


class _Clock:
    """Calls functions at their times, in a thread that begins with the first of them."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, SharedTimer]] = []
        self._numbers = count()  # of two at the same time the earlier goes first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, timer: SharedTimer) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + timer.interval, next(self._numbers), timer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="timers", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or (left := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left if self._due else None)
                _, _, timer = heapq.heappop(self._due)
            timer.fire()


_CLOCK = _Clock()


class SharedTimer:
    """As `threading.Timer`; its function must be short, for the others wait for it."""

    def __init__(self, interval: float, function: Callable[..., Any], args: Any = None, kwargs: Any = None) -> None:
        self.interval = interval
        self.daemon = True
        self._call: Callable[[], Any] | None = lambda: function(*(args or ()), **(kwargs or {}))

    def start(self) -> None:
        _CLOCK.add(self)

    def cancel(self) -> None:
        self._call = None  # and with it what it holds

    def fire(self) -> None:
        """Once; what goes wrong in it must not end the thread."""
        call, self._call = self._call, None
        try:
            if call is not None:
                call()
        except Exception:
            logging.getLogger(__name__).exception("a timer's function failed")


def with_shared_timers() -> SimpleNamespace:
    """The module `threading`, with such timers."""
    return SimpleNamespace(**{name: getattr(threading, name) for name in threading.__all__} | {"Timer": SharedTimer})
