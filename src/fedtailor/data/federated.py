"""What every data source ends in: rows of all clients one after another, cut into train, val and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedtailor.data.preparation import Preparation

TaskKind = Literal["classification", "regression"]


@dataclass(frozen=True)
class Rows:
    """Samples of all clients, client after client: those of client i are `starts[i]:starts[i + 1]`."""

    x: Tensor  # [rows, ...] floating point, or int64 (text)
    y: Tensor  # [rows] int64 (classification) or [rows, outputs] floating point (regression)
    starts: Tensor  # [clients + 1] int64

    @property
    def sizes(self) -> Tensor:
        """Number of samples per client."""
        return self.starts.diff()

    def bounds(self, clients: Sequence[int]) -> tuple[list[int], list[int]]:
        """First row and number of rows of each of `clients`."""
        at = torch.as_tensor(clients, dtype=torch.int64)
        first = self.starts[at]
        return first.tolist(), (self.starts[at + 1] - first).tolist()

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Features and targets of one client, as views."""
        a, b = int(self.starts[client]), int(self.starts[client + 1])
        return self.x[a:b], self.y[a:b]

    def only(self, clients: Sequence[int]) -> Rows:
        """The rows of some clients."""
        x, y = (torch.cat(parts) for parts in zip(*(self.of(c) for c in clients), strict=True))
        return Rows(x, y, torch.tensor([0, *self.bounds(clients)[1]]).cumsum(0))

    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows with floating-point numbers of another width."""
        x, y = (v.to(dtype) if v.is_floating_point() else v for v in (self.x, self.y))
        return Rows(x, y, self.starts)


@dataclass(frozen=True)
class FederatedData:
    """The data of a federation: who takes part, what they hold, and what is to be predicted."""

    name: str
    task: TaskKind
    clients: tuple[str, ...]
    train: Rows
    val: Rows  # may be empty for a client
    test: Rows  # may be empty for a client
    outputs: int  # classes, or target columns
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # names of the columns of x, where they have names
    notes: tuple[str, ...] = field(
        default=()
    )  # what the partition made, what was imputed, ...: shown and saved with a run
    preparation: Preparation | None = None  # of tables: how rows that come later are prepared

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train.x.shape[1:])

    def only(self, clients: Sequence[int]) -> FederatedData:
        """The data of some clients."""
        rows = {split: getattr(self, split).only(clients) for split in ("train", "val", "test")}
        return replace(self, clients=tuple(self.clients[c] for c in clients), **rows)

    def to(self, dtype: torch.dtype) -> FederatedData:
        """The same data with floating-point numbers of another width."""
        return replace(self, train=self.train.to(dtype), val=self.val.to(dtype), test=self.test.to(dtype))
