"""Memory that a step frees is kept for the next one.

Left alone, the C library gives the pages of large tensors back to the system after every operation and asks for them
again at the next: a thousand page faults in a step of a small convolutional network, and up to a third of its time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# names and numbers as in malloc.h of glibc
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 1 << 29  # bytes that may lie free; what is beyond goes back to the system
LARGE = 1 << 26  # tensors from this size on are the system's own as soon as they are free
LARGE_MODEL = 1 << 24  # bytes from which on a client takes much longer than this
AHEAD = 1 << 24  # asked for at a time
WANTED = {M_MMAP_THRESHOLD: LARGE, M_TRIM_THRESHOLD: KEPT, M_TOP_PAD: AHEAD}
DEFAULT = {M_MMAP_THRESHOLD: 1 << 17, M_TRIM_THRESHOLD: 1 << 17, M_TOP_PAD: 0}  # of glibc


@contextmanager
def kept() -> Iterator[bool]:
    """For this process and those it forks meanwhile; tells whether the C library is one that can be told."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    mallopt = getattr(library, "mallopt", None)
    if library is None or mallopt is None:  # not glibc
        yield False
        return
    is_kept = all(mallopt(option, value) == 1 for option, value in WANTED.items())
    try:
        yield is_kept
    finally:
        for option, value in DEFAULT.items():
            mallopt(option, value)
        trim()


def trim() -> None:
    """What lies free goes back to the system."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def trim_after_client(model: int) -> None:
    """Between clients with models of so many bytes: holes among large tensors would grow from client to client."""
    if model >= LARGE_MODEL:
        trim()
