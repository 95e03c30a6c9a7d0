"""Writes down in which order a process first enters the files of fedtailor. Python imports it by its name.

A file per process in the folder TRACE_FILES, for the sources in TRACE_SOURCE.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE, FILES = f"{os.environ['TRACE_SOURCE']}/", Path(os.environ["TRACE_FILES"])
seen = set[str]()


def is_import(frame: FrameType | None) -> bool:
    """Whether this is code that runs because a module of fedtailor is imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith("fedtailor"):
            return True
        frame = frame.f_back
    return False


def trace(frame: FrameType, event: str, argument: Any) -> None:
    """Called with every call of a function."""
    code = frame.f_code
    if event != "call" or code.co_filename in seen or not code.co_filename.startswith(SOURCE):
        return
    if code.co_flags & inspect.CO_OPTIMIZED and not is_import(frame):  # neither a module nor the body of a class
        seen.add(code.co_filename)
        with (FILES / str(os.getpid())).open("a") as entries:
            entries.write(f"{code.co_filename.removeprefix(SOURCE)}\n")


threading.setprofile(trace)
sys.setprofile(trace)
