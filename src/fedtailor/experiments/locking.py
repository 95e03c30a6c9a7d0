"""One process at a time on a run's folder; who that is can be read in the file."""

from __future__ import annotations

import getpass
import json
import os
import platform
import time
from contextlib import suppress
from typing import IO


def lock(file: IO[str], *, waits: bool = False) -> None:
    """Raises an OSError if another process holds it, or waits. Systems without file locks do without."""
    with suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)


def hold(file: IO[str]) -> None:
    """Lock a file and write into it who has it."""
    lock(file)
    _sign(file)


def _sign(file: IO[str]) -> None:
    """Say who holds it, for people; the lock itself ends with the process."""
    with suppress(OSError):
        file.truncate(0)
        json.dump({"process": os.getpid(), "user": _user(), "host": platform.node(), "since": time.time()}, file)
        file.flush()


def owner(file: IO[str]) -> str:
    """Who holds it and for how long, in words; nothing if the file does not say."""
    try:
        file.seek(0)
        held = json.load(file)
        minutes = max(0.0, time.time() - float(held["since"])) / 60
        age = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
        return f" (process {int(held['process'])} of {held['user']} on {held['host']}, for {age})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _user() -> str:
    with suppress(KeyError, OSError, ImportError):  # a container may have no name for it
        return getpass.getuser()
    return "somebody"
