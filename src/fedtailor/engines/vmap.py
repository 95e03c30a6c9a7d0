"""`vmap`: clients stacked, so that one tensor operation serves many. For many small clients and dense models."""

from __future__ import annotations

from fedtailor.core.disk import Disk
from fedtailor.core.me import Setting
from fedtailor.engines.inprocess import InProcess
from fedtailor.local import dense

AT_MOST = 256


def vmap(setting: Setting, chunk: int = 0, disk: Disk | None = None) -> InProcess:
    """Stacks of clients of similar size, at most `chunk`; the shorter ones are padded and masked."""
    return InProcess(setting, range(len(setting.data.clients)), chunk=chunk or fitting(setting), disk=disk)


def fitting(setting: Setting) -> int:
    """So many clients that a step finds the parameters of all of them in the cache; dense layers see to that alone."""
    some = dense.at_a_time({k: v[None] for k, v in setting.model.params.items()})
    return min(AT_MOST, some * 8 if dense.layers_of(setting.model) and setting.solver.is_plain else some)
