"""`vmap`: clients stacked, so that one tensor operation serves many. For many small clients and dense models."""

from __future__ import annotations

from fedtailor.core.disk import Disk
from fedtailor.core.me import Setting
from fedtailor.engines.inprocess import InProcess

CACHE = 6 * 2**20  # bytes of parameters that a core works on fast


def vmap(setting: Setting, chunk: int = 0, disk: Disk | None = None) -> InProcess:
    """Stacks of clients of similar size, at most `chunk`; the shorter ones are padded and masked."""
    return InProcess(setting, range(len(setting.data.clients)), chunk=chunk or fitting(setting), disk=disk)


def fitting(setting: Setting) -> int:
    """So many clients that a step finds the parameters of all of them in the cache."""
    size = sum(v.nbytes for v in setting.model.params.values())
    return max(1, min(256, CACHE // size))
