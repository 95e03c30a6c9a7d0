"""Who takes part in a round, and what people are told of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """A client whose reply was not used, and why."""

    client: str
    round: int
    function: str
    reason: str


@dataclass
class Record:
    """What people are told: faults and single replies that were looked at, of the run; reports, of the round."""

    faults: list[Fault] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)
    reported: dict[str, float | list[float]] = field(default_factory=dict)


@dataclass
class Attendance:
    """Who takes part in the round."""

    round: int = 0
    asked: tuple[int, ...] = ()
    present: tuple[int, ...] = ()  # those asked whose replies were all usable so far
    missed: list[tuple[int, ...]] = field(default_factory=list)  # of each exchange of the round
