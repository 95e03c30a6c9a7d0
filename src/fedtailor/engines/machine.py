"""The machine that clients run on: its cores and memory, and settings of this process while they train."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedtailor.engines import malloc

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNKNOWN = 2**33  # bytes, where a system does not tell how many it has


def cores() -> int:
    """How many this process may use: those it may run on, or fewer if its container has a share of less."""
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
    """Bytes of the machine, or of the container if that has less."""
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
def prepared(threads: int = 1) -> Iterator[None]:
    """Threads and memory as training likes them; afterwards as they were.

    One thread, unless more are asked for: sums over several round differently, and the same configuration should give
    the same numbers on every machine. More cores are used by more processes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with malloc.kept():
            yield
    finally:
        torch.set_num_threads(before)
