"""One process at a time on a run's folder."""

from __future__ import annotations

from contextlib import suppress
from typing import IO


def lock(file: IO[str], *, waits: bool = False) -> None:
    """Raises an OSError if another process holds it, or waits. Systems without file locks do without."""
    with suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
