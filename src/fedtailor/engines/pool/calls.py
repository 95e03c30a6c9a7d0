"""What the server of a pool remembers of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedtailor.core.client import Call
from fedtailor.engines.pool.processes import Process
from fedtailor.engines.pool.shared_memory import Region
from fedtailor.engines.pool.worker import Task


@dataclass(frozen=True)
class Message:
    """A tree in shared memory, and how a worker finds it."""

    content: dict[str, Any]
    region: Region  # the memory is the message's as long as this is held


@dataclass
class TapedCall:
    """A taped call, as it must be known to run it again."""

    call: Call
    message: Message
    tasks: dict[int, Task]
    owners: dict[int, Process] = field(default_factory=dict)  # who holds the graph
