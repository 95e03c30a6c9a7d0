"""Memory that a step frees is kept for the next one.

Left alone, the C library gives the pages of large tensors back to the system after every operation and asks for them
again at the next: a thousand page faults in a step of a small convolutional network, and up to a third of its time.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

# names and numbers as in malloc.h of glibc
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 1 << 29  # bytes that may lie free; what is beyond goes back to the system
LARGE = 1 << 26  # tensors from this size on are the system's own as soon as they are free
AHEAD = 1 << 24  # asked for at a time


@cache
def keep() -> bool:
    """For this process and those it forks; tells whether the C library is one that can be told."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    options = {M_MMAP_THRESHOLD: LARGE, M_TRIM_THRESHOLD: KEPT, M_TOP_PAD: AHEAD}
    return all(mallopt(option, value) == 1 for option, value in options.items())
