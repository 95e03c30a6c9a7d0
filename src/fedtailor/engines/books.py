"""The pool's books: which row of memory holds what, and who is to be asked next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedtailor.engines.worker import Task


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
    """Tasks that any worker may do."""

    def __init__(self, costs: Sequence[int]) -> None:
        self._costs = costs
        self._tasks: list[Task] = []  # the next one last
        self.left = 0  # their costs

    def add(self, task: Task) -> None:
        """To be done next."""
        self._tasks.append(task)
        self.left += self._costs[task.client]

    def portion(self, share: float, most: int, alone: Counter[int]) -> list[Task]:
        """Tasks of about that cost, at least one and at most so many (0: any); those of `alone` each for itself."""
        portion: list[Task] = []
        while self._tasks:
            cost = self._costs[self._tasks[-1].client]
            if portion and (cost > share + 1e-9 * self.left or len(portion) == most):
                break
            if portion and (alone[self._tasks[-1].client] or alone[portion[0].client]):
                break
            portion.append(self._tasks.pop())
            share -= cost
            self.left -= cost
        return portion
