"""`vmap`: clients stacked, so that one tensor operation serves many. For many small clients and dense models."""

from __future__ import annotations

from fedtailor.core.disk import Disk
from fedtailor.core.me import Setting
from fedtailor.engines.inprocess import InProcess
from fedtailor.local import dense

CACHED = 6 * 2**20  # bytes of parameters on which stacked autograd is fast
STACKED = 8 * CACHED  # dense layers cut a stack to the cache by themselves; what is left is to call them seldom
AT_MOST = 256


def vmap(setting: Setting, chunk: int = 0, disk: Disk | None = None) -> InProcess:
    """Stacks of clients of similar size, at most `chunk`; the shorter ones are padded and masked."""
    return InProcess(setting, range(len(setting.data.clients)), chunk=chunk or fitting(setting), disk=disk)


def fitting(setting: Setting) -> int:
    """So many clients in a stack that their training is fast."""
    size = sum(v.nbytes for v in setting.model.params.values())
    is_dense = bool(dense.layers_of(setting.model)) and setting.solver.is_plain
    return max(1, min(AT_MOST, (STACKED if is_dense else CACHED) // size))
