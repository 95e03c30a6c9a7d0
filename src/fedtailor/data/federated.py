"""What every data source ends in: rows of all clients one after another, cut into train, val and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

TaskKind = Literal["classification", "regression"]


@dataclass(frozen=True)
class Rows:
    """Samples of all clients, client after client: those of client i are `starts[i]:starts[i + 1]`."""

    x: Tensor  # [rows, ...] floating point
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

    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows with floating-point numbers of another width."""
        y = self.y.to(dtype) if self.y.is_floating_point() else self.y
        return Rows(self.x.to(dtype), y, self.starts)


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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train.x.shape[1:])

    def to(self, dtype: torch.dtype) -> FederatedData:
        """The same data with floating-point numbers of another width."""
        return replace(self, train=self.train.to(dtype), val=self.val.to(dtype), test=self.test.to(dtype))
