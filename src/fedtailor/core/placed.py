"""Values that each client of a cohort has its own version of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedtailor.core.trees import Tree, tree_map


@dataclass(frozen=True)
class Placed:
    """A value that each client of the cohort has its own version of: a tree with a leading client dimension."""

    clients: tuple[int, ...]
    tree: Tree

    def __iter__(self) -> Iterator[Placed]:
        """The parts of a reply that is a tuple."""
        return (Placed(self.clients, part) for part in self.tree)

    def __getitem__(self, key: str | int) -> Placed:
        return Placed(self.clients, self.tree[key])

    def of(self, clients: tuple[int, ...]) -> Tree:
        """The rows of some of the clients."""
        if clients == self.clients:
            return self.tree
        position = {c: i for i, c in enumerate(self.clients)}
        rows = [position[c] for c in clients]
        return tree_map(lambda v: v[rows], self.tree)


def row(args: tuple[Tree, ...], placed: tuple[bool, ...], at: int = 0) -> tuple[Tree, ...]:
    """The message as one client receives it."""
    return tuple(tree_map(lambda v: v[at], a) if own else a for a, own in zip(args, placed, strict=True))


def in_order(parts: list[tuple[tuple[int, ...], Tree]], clients: tuple[int, ...]) -> Tree:
    """Rows of several groups as one stack, in the order of `clients`; rows of others are left out."""
    have = [c for group, _ in parts for c in group]
    tree = parts[0][1] if len(parts) == 1 else tree_map(lambda *v: torch.cat(v), *(tree for _, tree in parts))
    if tuple(have) == clients:
        return tree
    position = {c: i for i, c in enumerate(have)}
    rows = torch.tensor([position[c] for c in clients])
    return tree_map(lambda v: v[rows], tree)
