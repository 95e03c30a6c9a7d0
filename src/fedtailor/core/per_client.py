"""Values that each client of a cohort has its own version of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from fedtailor.core.process_group import ALONE, ProcessGroup
from fedtailor.core.trees import Tree, tree_map

if TYPE_CHECKING:
    from fedtailor.core.client import Call
    from fedtailor.core.replies import ReplyStream

Path = tuple[str | int, ...]


class PerClient:
    """A value that each client has its own version of. What single clients have is told by `fed.gather` alone.

    Replies of a call may still be on their way; they come when somebody asks for them.
    """

    def __init__(self, clients: tuple[int, ...], rows: Tree, group: ProcessGroup = ALONE) -> None:
        """Rows with a leading client dimension: of all `clients` or, with a group, of those on this rank."""
        self._clients, self._rows, self._group = clients, rows, group
        self._stream: ReplyStream | None = None
        self._path: Path = ()
        self._asked: tuple[Call, Tree] | None = None

    @classmethod
    def of_call(cls, clients: tuple[int, ...], rows: Tree, group: ProcessGroup, call: Call, example: Tree) -> PerClient:
        """Replies to a call that have come."""
        replies = cls(clients, rows, group)
        replies._asked = call, example
        return replies

    @classmethod
    def of_stream(cls, stream: ReplyStream, path: Path = ()) -> PerClient:
        """A part of replies that have not come yet."""
        part = cls((), None, stream.fed.group)
        part._stream, part._path = stream, path
        return part

    @property
    def pending(self) -> ReplyStream | None:
        """The replies that have to come first, if they have not."""
        return self._stream if self._stream is not None and not self._stream.is_done else None

    @property
    def call(self) -> Call | None:
        """What this is a reply to, or a part of a reply; None for what the server made."""
        if self._stream is not None:
            return self._stream.call
        return None if self._asked is None else self._asked[0]

    @property
    def example(self) -> Tree:
        """A whole reply to `call`, as it is declared."""
        if self._stream is not None:
            return self._stream.example
        return None if self._asked is None else self._asked[1]

    @property
    def path(self) -> Path:
        """Which part of its replies this is."""
        return self._path

    @property
    def stream(self) -> ReplyStream | None:
        """The replies of which this is a part."""
        return self._stream

    @property
    def clients(self) -> tuple[int, ...]:
        """Who has a version."""
        return self._clients if self._stream is None else self._stream.clients

    def __iter__(self) -> Iterator[PerClient]:
        """The parts of a reply that is a tuple."""
        shape = self._rows if self._stream is None else at_path(self._stream.example, self._path)
        return (self[i] for i in range(len(shape)))

    def __getitem__(self, key: str | int) -> PerClient:
        if self._stream is not None:
            return PerClient.of_stream(self._stream, (*self._path, key))
        part = PerClient(self._clients, self._rows[key], self._group)
        part._path, part._asked = (*self._path, key), self._asked
        return part

    def rows(self, group: ProcessGroup, clients: tuple[int, ...] | None = None) -> Tree:
        """For the federation: the rows of all or some clients; of those on this rank."""
        own = self._own()
        wanted = self.clients if clients is None else clients
        if self._group is not group:  # made from what the server knows, so all rows are there
            return group.own(_some(own, self.clients, wanted), wanted)
        return _some(own, group.mine(self.clients), group.mine(wanted))

    def everywhere(self, clients: Sequence[int] | None = None) -> Tree:
        """For the federation: the rows of all or some clients, on every rank."""
        rows = self._group.everywhere(self._own(), self.clients)
        return _some(rows, self.clients, self.clients if clients is None else tuple(clients))

    def _own(self) -> Tree:
        return self._rows if self._stream is None else self._stream.rows(self._path)


def at_path(tree: Tree, path: Path) -> Tree:
    """The part of a tree at a path."""
    for key in path:
        tree = tree[key]
    return tree


def _some(rows: Tree, clients: tuple[int, ...], wanted: tuple[int, ...]) -> Tree:
    if wanted == clients:
        return rows
    position = {c: i for i, c in enumerate(clients)}
    at = [position[c] for c in wanted]
    return tree_map(lambda v: v[at], rows)


def row(args: tuple[Tree, ...], placed: tuple[bool, ...], at: int) -> tuple[Tree, ...]:
    """The message as one client receives it."""
    return tuple(tree_map(lambda v: v[at], a) if own else a for a, own in zip(args, placed, strict=True))


def outline(args: tuple[Tree, ...], placed: tuple[bool, ...]) -> tuple[Tree, ...]:
    """The shapes and types of the message as a client receives it, even if there is none here."""

    def one(v: torch.Tensor) -> torch.Tensor:
        return v.new_empty(()).expand(v.shape[1:])

    return tuple(tree_map(one, a) if own else a for a, own in zip(args, placed, strict=True))


def in_order(parts: list[tuple[tuple[int, ...], Tree]], clients: tuple[int, ...], example: Tree = None) -> Tree:
    """Rows of several groups as one stack, in the order of `clients`; rows of others are left out.

    `example`, a row, gives the shapes where there is no group.
    """
    if not parts:
        return tree_map(lambda v: v.new_empty((0, *v.shape)), example)
    have = [c for group, _ in parts for c in group]
    tree = parts[0][1] if len(parts) == 1 else tree_map(lambda *v: torch.cat(v), *(tree for _, tree in parts))
    if tuple(have) == clients:
        return tree
    position = {c: i for i, c in enumerate(have)}
    at = [position[c] for c in clients]
    return tree_map(lambda v: v[at], tree)
