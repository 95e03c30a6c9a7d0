"""`loop`: one client after the other, in this process. The reference that the other engines must equal."""

from __future__ import annotations

from fedtailor.core.disk import Disk
from fedtailor.core.me import Setting
from fedtailor.engines.inprocess import InProcess


def loop(setting: Setting, disk: Disk | None = None) -> InProcess:
    """Clients one after the other; an error names algorithm, function, client and round."""
    return InProcess(setting, range(len(setting.data.clients)), disk=disk)
