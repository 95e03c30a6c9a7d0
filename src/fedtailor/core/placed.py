"""Values that each client of a cohort has its own version of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from fedtailor.core.ranks import ALONE, Ranks
from fedtailor.core.trees import Tree, tree_map


@dataclass(frozen=True)
class Placed:
    """A value that each client of the cohort has its own version of: a tree with a leading client dimension."""

    clients: tuple[int, ...]
    rows: Tree  # of all of them; with `ranks`, of those on this rank
    ranks: Ranks = ALONE

    @cached_property
    def tree(self) -> Tree:
        """The rows of all clients."""
        return self.ranks.everywhere(self.rows, self.clients)

    def __iter__(self) -> Iterator[Placed]:
        """The parts of a reply that is a tuple."""
        return (Placed(self.clients, part, self.ranks) for part in self.rows)

    def __getitem__(self, key: str | int) -> Placed:
        return Placed(self.clients, self.rows[key], self.ranks)

    def of(self, clients: tuple[int, ...]) -> Tree:
        """The rows of some of the clients."""
        return _some(self.tree, self.clients, clients)

    def here(self, clients: tuple[int, ...], ranks: Ranks) -> Tree:
        """The rows of some of the clients: of those on this rank."""
        if self.ranks is not ranks:  # made from what the server knows, so all rows are there
            return ranks.own(self.of(clients), clients)
        if clients == self.clients:
            return self.rows
        return _some(self.rows, ranks.mine(self.clients), ranks.mine(clients))


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
    rows = torch.tensor([position[c] for c in clients], dtype=torch.int64)
    return tree_map(lambda v: v[rows], tree)
