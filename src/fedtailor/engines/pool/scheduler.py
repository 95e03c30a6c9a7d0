"""The pool's books: which row of memory holds what, and who is to be asked next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from fedtailor.engines.pool.worker import Task


class Unit(NamedTuple):
    """What is asked for one client, or for clients in a stack."""

    number: int  # among the units of a request
    tasks: tuple[Task, ...]


class Rows:
    """Which row of memory holds what. Rows come back when nothing can ask for them any more."""

    def __init__(self, clients: int) -> None:
        self.now = list(range(clients))  # row of the private state of each client
        self.before: dict[int, int] = {}  # where that was when the round began, if it is another
        self.used = clients
        self._free: list[int] = []
        self._held: list[int] = []  # of former calls of a tape

    def fresh(self) -> int:
        """A row that nobody reads."""
        if self._free:
            return self._free.pop()
        self.used += 1
        return self.used - 1

    def drop(self, rows: Sequence[int]) -> None:
        """Nobody reads these any more."""
        self._free += rows

    def move(self, client: int, to: int, *, taping: bool) -> None:
        """The private state of a client is in another row from now on."""
        old, self.now[client] = self.now[client], to
        if client not in self.before:
            self.before[client] = old
        else:
            (self._held if taping else self._free).append(old)

    def undo(self, clients: Sequence[int]) -> None:
        """Back to the rows when the round began."""
        for client in clients:
            if client in self.before:
                self._held.append(self.now[client])
                self.now[client] = self.before.pop(client)

    def forget_tape(self) -> None:
        """Nothing will be run again."""
        self._free += self._held
        self._held = []

    def begin(self) -> None:
        """What is there now is what undo brings back."""
        self._free += self.before.values()
        self.before = {}
        self.forget_tape()


class Queue:
    """Units of work that any worker may do, the next one first. A unit is done by one worker, at once."""

    def __init__(self, costs: Sequence[int]) -> None:
        self._costs = costs
        self._units: deque[tuple[Unit, int]] = deque()  # with their costs
        self.left = 0  # the sum of these

    def __bool__(self) -> bool:
        return bool(self._units)

    def add(self, unit: Unit, *, first: bool = False) -> None:
        """To be done last or, if it was tried before, next."""
        cost = sum(self._costs[task.client] for task in unit.tasks)
        (self._units.appendleft if first else self._units.append)((unit, cost))
        self.left += cost

    def portion(self, share: float, most: int, alone: Counter[int]) -> list[Unit]:
        """Units of about that cost, at least one and at most so many; those with clients in `alone` for themselves."""
        portion: list[Unit] = []
        while self._units and len(portion) < max(most, 1):
            unit, cost = self._units[0]
            is_apart = bool(alone) and any(alone[task.client] for task in unit.tasks)
            if portion and (cost > share + 1e-9 * self.left or is_apart):
                break
            self._units.popleft()
            portion.append(unit)
            share -= cost
            self.left -= cost
            if is_apart:
                break
        return portion
