"""Samples of all clients, one after another: tensors, named tensors, or samples that are read when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtailor.core.trees import Tree, leaves, moved, tree_map


class Stored(Protocol):
    """Samples that lie elsewhere and are read by number: a file, or a Dataset of the user's."""

    def __len__(self) -> int: ...

    def read(self, rows: Tensor) -> Tree:
        """The samples of these numbers, as a tensor or as named tensors; never kept."""

    def to(self, dtype: torch.dtype) -> Stored:
        """The same with floating-point numbers of another width."""


Inputs = Any  # Tensor | dict[str, Tensor] | Stored


def count(x: Inputs | Tree) -> int:
    """How many samples there are."""
    return len(next(iter(x.values()))) if isinstance(x, dict) else len(x)


def take(x: Inputs, rows: Tensor) -> Tree:
    """The samples of a batch, or of a stack of batches."""
    if isinstance(x, Tensor):  # index_select is faster than x[rows]
        return x.index_select(0, rows.reshape(-1).to(x.device)).reshape(*rows.shape, *x.shape[1:])
    if isinstance(x, dict):
        return {k: take(v, rows) for k, v in x.items()}
    return tree_map(lambda v: v.reshape(*rows.shape, *v.shape[1:]), x.read(rows.reshape(-1).cpu()))


def between(x: Inputs, start: int, end: int) -> Tree:
    """Samples that follow each other, as views where they are in memory."""
    if isinstance(x, Tensor | dict):
        return tree_map(lambda v: v[start:end], x)
    return x.read(torch.arange(start, end, device="cpu"))


@dataclass(frozen=True)
class Rows:
    """Samples of all clients, client after client: those of client i are `starts[i]:starts[i + 1]`."""

    x: Inputs  # [rows, ...] floating point or int64 (text); a dict of such tensors goes to the model as keywords
    y: Tensor  # what it looks like, the task says
    starts: Tensor  # [clients + 1] int64
    is_here: bool = True  # else only the number of rows is known, and x and y show what one looks like
    checked: tuple[str, int] | None = field(default=None, init=False, repr=False, compare=False)  # task and outputs

    @property
    def sizes(self) -> Tensor:
        """Number of samples per client."""
        return self.starts.diff()

    @property
    def in_memory(self) -> bool:
        """Whether x is there already."""
        return isinstance(self.x, Tensor | dict)

    @property
    def home(self) -> torch.device:
        """Where row numbers are looked up: beside x, or on the host that reads it."""
        return leaves(self.x)[0].device if self.in_memory else self.starts.device

    @property
    def tensors(self) -> dict[str, Tree]:
        """What is in memory, by name."""
        return {"x": self.x, "y": self.y} if self.in_memory else {"y": self.y}

    def bounds(self, clients: Sequence[int]) -> tuple[list[int], list[int]]:
        """First row and number of rows of each of `clients`."""
        at = self.starts.new_tensor(clients)
        first = self.starts[at]
        return first.tolist(), (self.starts[at + 1] - first).tolist()

    def padded(self, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Row numbers [clients, longest] and which of them count; shorter ones repeat a sample, if need be of others.

        Never zeros: what a model makes of them need not be finite, and would reach what is computed from the batch.
        """
        starts, sizes = (self.starts.new_tensor(v)[:, None] for v in self.bounds(clients))
        place = torch.arange(int(sizes.max()), device=self.starts.device)
        counts = place < sizes
        at = torch.where(counts, starts + place, starts).clamp(max=max(len(self.y) - 1, 0))
        return at, counts

    def first(self, samples: int) -> Tree:
        """The first samples, to see what one looks like."""
        return between(self.x, 0, min(samples, count(self.x)))

    def of(self, client: int) -> tuple[Tree, Tensor]:
        """Features and targets of one client, as views where they are in memory."""
        a, b = int(self.starts[client]), int(self.starts[client + 1])
        return between(self.x, a, b), self.y[a:b]

    def targets(self, client: int) -> Tensor:
        """Of one client, as a view."""
        return self.y[int(self.starts[client]) : int(self.starts[client + 1])]

    def only(self, clients: Sequence[int]) -> Rows:
        """The rows of some clients."""
        firsts, sizes = self.bounds(clients)
        here = self.starts.device
        at = torch.cat([torch.arange(a, a + n, device=here) for a, n in zip(firsts, sizes, strict=True)])
        x = take(self.x, at) if self.in_memory else Chosen(self.x, at)
        return self._checked_as(
            replace(self, x=x, y=take(self.y, at), starts=self.starts.new_tensor([0, *sizes]).cumsum(0))
        )

    def on(self, device: torch.device) -> Rows:
        """The same rows on a device, or read to it; where they start is looked up on the host."""
        x = moved(self.x, device) if self.in_memory else OnDevice(self.x, device)
        return self._checked_as(replace(self, x=x, y=self.y.to(device)))

    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows with floating-point numbers of another width."""

        def widened(v: Tensor) -> Tensor:
            return v.to(dtype) if v.is_floating_point() else v

        x = tree_map(widened, self.x) if self.in_memory else self.x.to(dtype)
        rows = replace(self, x=x, y=widened(self.y))
        # a large number may have no finite neighbour in a narrower type
        before, after = ([v for v in _flat(r.tensors) if v.is_floating_point()] for r in (self, rows))
        is_narrower = any(new.itemsize < old.itemsize for new, old in zip(after, before, strict=True))
        return rows if is_narrower else self._checked_as(rows)

    def _checked_as(self, rows: Rows) -> Rows:
        """Rows made of these need not be looked through again."""
        object.__setattr__(rows, "checked", self.checked)
        return rows


@dataclass(frozen=True)
class Chosen:
    """Some of the samples that lie elsewhere."""

    whole: Stored
    at: Tensor

    def __len__(self) -> int:
        return len(self.at)

    def read(self, rows: Tensor) -> Tree:
        return self.whole.read(self.at[rows])

    def to(self, dtype: torch.dtype) -> Chosen:
        return Chosen(self.whole.to(dtype), self.at)


@dataclass(frozen=True)
class OnDevice:
    """Samples that lie elsewhere, for clients that compute on a device."""

    whole: Stored
    device: torch.device

    def __len__(self) -> int:
        return len(self.whole)

    def read(self, rows: Tensor) -> Tree:
        return moved(self.whole.read(rows), self.device)

    def to(self, dtype: torch.dtype) -> OnDevice:
        return OnDevice(self.whole.to(dtype), self.device)


def _flat(tensors: dict[str, Tree]) -> list[Tensor]:
    return [v for part in tensors.values() for v in (part.values() if isinstance(part, dict) else [part])]
