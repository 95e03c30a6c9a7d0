"""The private states of all clients, stacked: one row per client and tensor, with an undo for the running round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.core.trees import Schema, Tree, changed_leaves, leaves, schema, schema_difference, to_device, tree_map
from fedtailor.engines import devices
from fedtailor.engines.devices import CPU
from fedtailor.engines.disk import Disk


class States:
    """Rows are read as copies and written in place; `undo` brings back what a client had at `begin`.

    Rows larger than the budget of `disk` are on disk, and in memory only while they are used; rows larger than half of
    the device's free memory are in the host's memory.
    """

    def __init__(self, clients: Sequence[int], disk: Disk | None = None, device: torch.device = CPU) -> None:
        self.clients, self.device = tuple(clients), device
        self._disk, self._on_disk = disk, False
        self.rows: Tree = None  # as a client's state, with a leading dimension of all clients
        self._row = {c: i for i, c in enumerate(self.clients)}
        self._log: list[tuple[Tensor, Tree]] = []
        self._logged = torch.zeros(len(self.clients), dtype=torch.bool, device="cpu")
        self._shared = False  # whether the log holds tensors that are rows still

    def create(self, clients: Sequence[int], stack: Tree) -> None:
        """First states of some clients; those of the first call fix keys, shapes and types."""
        if self.rows is None:
            self.rows = self._allocate(stack)
        self.check(stack)
        if self._disk is not None and self._on_disk and tuple(clients) == self.clients:
            for row, new in zip(leaves(self.rows), leaves(stack), strict=True):
                self._disk.fill(row, new)
        else:
            self._write(self._at(clients), tree_map(torch.clone, stack))

    def _allocate(self, stack: Tree) -> Tree:
        """Rows for all clients, shaped as the states of some."""
        shapes = tree_map(lambda v: torch.empty((len(self.clients), *v.shape[1:]), dtype=v.dtype, device="meta"), stack)
        size = sum(v.nbytes for v in leaves(shapes))
        disk = self._disk if self._disk is not None and size > self._disk.budget else None
        self._on_disk = disk is not None
        home = self.device if disk is None and devices.has_room(self.device, size) else CPU

        def zeros(v: Tensor) -> Tensor:  # `zeros_like` of a meta tensor imports SymPy
            return torch.zeros(v.shape, dtype=v.dtype, device=home) if disk is None else disk.zeros(v.shape, v.dtype)

        return tree_map(zeros, shapes)

    def read(self, clients: Sequence[int]) -> Tree:
        at = self._at(clients)
        rows = tree_map(lambda v: v[at], self.rows)
        self._touch(rows)
        return to_device(rows, self.device)

    def _touch(self, rows: Tree) -> None:
        if self._disk is not None and self._on_disk:
            self._disk.touch(sum(v.nbytes for v in leaves(rows)))

    def all_rows(self, clients: Sequence[int]) -> Tree | None:
        """The rows themselves, if `clients` are all; they may be read only, and handed on to `take_over`."""
        is_here = all(v.device == self.device for v in leaves(self.rows))
        return self.rows if tuple(clients) == self.clients and not self._on_disk and is_here else None

    def take_over(self, stack: Tree) -> None:
        """New states of all clients, made from `all_rows`: the tensors become the rows, nothing is copied."""
        self.check(stack)
        if self._logged.any():  # written to before in this round; what has not changed since is the rows themselves
            self.write(self.clients, stack, self.rows)
            return
        self._log.append((self._at(self.clients), self.rows))
        self._logged[:] = True
        self.rows, self._shared = stack, True

    def write(self, clients: Sequence[int], stack: Tree, old: Tree = None) -> None:
        """New states of `clients`; `undo` brings back those at `begin`. Leaves that `old`, as read, has too stay."""
        self.check(stack)
        if self._shared:
            self.rows, self._shared = tree_map(torch.clone, self.rows), False
        at = self._at(clients)
        fresh = at[~self._logged[at]]
        if len(fresh):
            whole = old is not None and len(fresh) == len(at)
            self._log.append((fresh, old if whole else tree_map(lambda v: v[fresh], self.rows)))
            self._logged[fresh] = True
        self._write(at, stack, old)

    def begin(self) -> None:
        """A new round: what is written from here on can be undone."""
        self._log.clear()
        self._logged.zero_()
        self._shared = False

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Bring back the states at `begin`, of all or of some clients."""
        if self._shared:
            self.rows, self._shared = tree_map(torch.clone, self.rows), False
        wanted = torch.zeros_like(self._logged)
        wanted[self._at(self.clients if clients is None else clients)] = True
        for at, old in self._log:
            keep = wanted[at]
            self._write(at[keep], tree_map(lambda v, keep=keep: v[keep], old))

    def check(self, stack: Tree) -> None:
        """Refuse states of other keys, shapes or types than the first ones."""
        refuse_other(schema(stack, stacked=True), schema(self.rows, stacked=True))

    def _at(self, clients: Sequence[int]) -> Tensor:
        return torch.tensor([self._row[c] for c in clients], dtype=torch.int64, device="cpu")

    def _write(self, at: Tensor, stack: Tree, old: Tree = None) -> None:
        for row, new in zip(
            leaves(self.rows), leaves(stack) if old is None else changed_leaves(stack, old), strict=True
        ):
            if new is not None:
                row[at] = new.detach().to(row.device)
        self._touch(stack)


def refuse_other(actual: Schema, first: Schema) -> None:
    """Private states keep the schema of the first one."""
    if wrong := schema_difference(actual, first):
        raise TypeError(f"private state {wrong}; client_init fixes its keys and shapes")
