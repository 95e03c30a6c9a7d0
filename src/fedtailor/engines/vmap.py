"""`vmap`: clients stacked, so that one tensor operation serves many. For many small clients and dense models."""

from __future__ import annotations

from fedtailor.core.me import Setting
from fedtailor.engines.inprocess import InProcess


def vmap(setting: Setting, chunk: int = 64) -> InProcess:
    """Stacks of at most `chunk` clients of similar size; the shorter ones are padded and masked."""
    return InProcess(setting, range(len(setting.data.clients)), chunk=chunk)
