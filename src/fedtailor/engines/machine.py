"""The machine that clients run on: its cores and memory, and settings of this process while they train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedtailor.engines import malloc

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """How many this process may use: those it may run on, or fewer if its container has a share of less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words("cpu.max") or [*_words("cpu/cpu.cfs_quota_us"), *_words("cpu/cpu.cfs_period_us")]
    if len(quota) == 2 and quota[0] not in ("max", "-1"):
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory() -> int:
    """Bytes of the machine, or of the container if that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [*_words("memory.max"), *_words("memory/memory.limit_in_bytes")]
    return min([whole, *(int(limit) for limit in limits if limit.isdigit())])


def _words(file: str) -> list[str]:
    try:
        return (CGROUP / file).read_text().split()
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
