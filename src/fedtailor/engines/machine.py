"""The machine that clients run on: its cores and memory, and settings of this process while they train."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNKNOWN = 2**33  # bytes, where a system does not tell how many it has
# names and numbers as in malloc.h of glibc
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 1 << 29  # bytes of free memory that are kept; more goes back to the system
LARGE = 1 << 26  # tensors from this size on are the system's own as soon as they are free
LARGE_MODEL = 1 << 24  # bytes from which on a client takes much longer than this
AHEAD = 1 << 24  # asked for at a time
WANTED = {M_MMAP_THRESHOLD: LARGE, M_TRIM_THRESHOLD: KEPT, M_TOP_PAD: AHEAD}
DEFAULT = {M_MMAP_THRESHOLD: 1 << 17, M_TRIM_THRESHOLD: 1 << 17, M_TOP_PAD: 0}  # of glibc


def cores() -> int:
    """Cores that this process may use; fewer if its container has a CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [allowed]
    for folder in _groups("cpu"):
        quota = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit():  # not "max" or -1
            shares.append(max(1, int(quota[0]) // int(quota[1])))
    return min(shares)


def memory() -> int:
    """Bytes of memory of the machine, or of the container if it has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else UNKNOWN
    files = [folder / name for folder in _groups("memory") for name in ("memory.max", "memory.limit_in_bytes")]
    return min([whole, *(int(word) for file in files for word in _words(file) if word.isdigit())])


def can_fork() -> bool:
    """Whether workers can be forked. macOS has the call, but its libraries do not survive it."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def _groups(controller: str) -> list[Path]:
    """Folders of the control groups whose limits hold for this process: its own and those around it.

    Version 2 has one tree, version 1 one for each controller. In a container the root is often the container's own
    group, whatever path the kernel tells.
    """
    folders = [CGROUP, CGROUP / controller]
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = CGROUP / controller if controllers else CGROUP
        for name in Path(path).parts[1:]:
            folder = folder / name
            folders.append(folder)
    return folders


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Memory that a step frees is kept for the next one, in this process and those it forks meanwhile.

    Left alone, the C library gives the pages of large tensors back to the system after every operation and asks for
    them again at the next: a thousand page faults in a step of a small convolutional network, and up to a third of its
    time. False where the C library is not glibc.
    """
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
    """Give free memory back to the system."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def trim_after_client(model: int) -> None:
    """Between clients with models of so many bytes: holes among large tensors would grow from client to client."""
    if model >= LARGE_MODEL:
        trim()


@contextmanager
def training_settings(threads: int = 1) -> Iterator[None]:
    """Threads and memory for training; afterwards as they were.

    One thread, unless more are asked for: sums over several round differently, and the same configuration should give
    the same numbers on every machine. More cores are used by more processes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with freed_memory_kept():
            yield
    finally:
        torch.set_num_threads(before)
