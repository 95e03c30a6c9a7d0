"""Processes that run one federation together: each has the whole server and some of the clients.

The server's text runs on every rank with the same numbers, so a value of the server is on all ranks, and its cotangent
too, complete. Rows of clients are on the rank of the client, and so are theirs. Four operations go between the two:

| operation | forward | its transpose |
|---|---|---|
| `total` | each rank's part -> the sum on all | the same on all -> each rank's part |
| `spread` | the same on all -> for use beside own rows | each rank's part -> the sum on all |
| `everywhere` | own rows -> all rows on all | all rows -> own rows |
| `own` | all rows on all -> own rows | own rows -> all rows on all |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from fedtailor.core.trees import Tree

T = TypeVar("T")


def under_torchrun() -> bool:
    """Whether this process is one of several that torchrun, or something like it, has started."""
    is_launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    return is_launched and os.environ["WORLD_SIZE"] != "1"


class ProcessGroup(Protocol):
    """Everything below is called by all ranks, in the same order."""

    rank: int
    count: int

    def mine(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Those of `clients` that are on this rank, in the same order."""

    def total(self, tree: Tree) -> Tree:
        """The sum over ranks."""

    def spread(self, tree: Tree) -> Tree:
        """The tree itself, to be used together with own rows."""

    def everywhere(self, rows: Tree, clients: Sequence[int]) -> Tree:
        """The rows of `clients`, from those of them that each rank has."""

    def own(self, rows: Tree, clients: Sequence[int]) -> Tree:
        """The rows of `mine(clients)`, from those of `clients`."""

    def gather_to_root(self, rows: Tree, clients: Sequence[int]) -> Tree:
        """As `everywhere`, for numbers, and on rank 0 only; None on the others."""

    def broadcast(self, tree: Tree) -> Tree:
        """The tree of rank 0."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """What each rank tells, in their order: anything that JSON can hold."""

    def agreed(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; what the user has to put right on one is an error on all of them."""


class SingleProcess:
    """One process: all clients are here, and nothing has to be sent."""

    rank = 0
    count = 1

    def mine(self, clients: Sequence[int]) -> tuple[int, ...]:
        return tuple(clients)

    def total(self, tree: Tree) -> Tree:
        return tree

    def spread(self, tree: Tree) -> Tree:
        return tree

    def everywhere(self, rows: Tree, clients: Sequence[int]) -> Tree:
        return rows

    def own(self, rows: Tree, clients: Sequence[int]) -> Tree:
        return rows

    def gather_to_root(self, rows: Tree, clients: Sequence[int]) -> Tree:
        return rows

    def broadcast(self, tree: Tree) -> Tree:
        return tree

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def agreed(self, work: Callable[[], T]) -> T:
        return work()


SINGLE_PROCESS = SingleProcess()
