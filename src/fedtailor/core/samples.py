"""What every data source ends in: rows of all clients one after another, cut into train, val and test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor.errors import DataError

TaskKind = Literal["classification", "regression"]
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Rows:
    """Samples of all clients, client after client: those of client i are `starts[i]:starts[i + 1]`."""

    x: Tensor  # [rows, ...] floating point, or int64 (text)
    y: Tensor  # [rows] int64 (classification) or [rows, outputs] floating point (regression)
    starts: Tensor  # [clients + 1] int64
    is_here: bool = True  # else only the number of rows is known, and x and y show what one looks like
    checked: tuple[str, int] | None = field(default=None, init=False, repr=False, compare=False)  # task and outputs

    @property
    def sizes(self) -> Tensor:
        """Number of samples per client."""
        return self.starts.diff()

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
        at = torch.where(counts, starts + place, starts).clamp(max=max(len(self.x) - 1, 0))
        return at, counts

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        """Features and targets of one client, as views."""
        a, b = int(self.starts[client]), int(self.starts[client + 1])
        return self.x[a:b], self.y[a:b]

    def only(self, clients: Sequence[int]) -> Rows:
        """The rows of some clients."""
        x, y = (torch.cat(parts) for parts in zip(*(self.of(c) for c in clients), strict=True))
        return self._checked_as(
            replace(self, x=x, y=y, starts=self.starts.new_tensor([0, *self.bounds(clients)[1]]).cumsum(0))
        )

    def on(self, device: torch.device) -> Rows:
        """The same rows on a device; where they start is looked up on the host."""
        return self._checked_as(replace(self, x=self.x.to(device), y=self.y.to(device)))

    def to(self, dtype: torch.dtype) -> Rows:
        """The same rows with floating-point numbers of another width."""
        x, y = (v.to(dtype) if v.is_floating_point() else v for v in (self.x, self.y))
        rows = replace(self, x=x, y=y)
        # a large number may have no finite neighbour in a narrower type
        is_narrower = any(new.itemsize < old.itemsize for new, old in ((x, self.x), (y, self.y)))
        return rows if is_narrower else self._checked_as(rows)

    def _checked_as(self, rows: Rows) -> Rows:
        """Rows made of these need not be looked through again."""
        object.__setattr__(rows, "checked", self.checked)
        return rows


@dataclass(frozen=True)
class FederatedData:
    """The data of a federation: who takes part, what they hold, and what is to be predicted.

    What does not fit together, or is no sample that could be learned from, is a `DataError` that names the client.
    """

    name: str
    task: TaskKind
    clients: tuple[str, ...]
    train: Rows  # a client without any cannot train: most algorithms say so in every round
    val: Rows  # may be empty for a client
    test: Rows  # may be empty for a client
    outputs: int  # classes, or target columns
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # names of the columns of x, where they have names
    notes: tuple[str, ...] = field(
        default=()
    )  # what the partition made, what was imputed, ...: shown and saved with a run
    preparation: Any = None  # of tables: how rows that come later are prepared

    def __post_init__(self) -> None:
        self._check_names()
        for split in SPLITS:
            rows: Rows = getattr(self, split)
            self._check_form(split, rows)
            if rows.is_here and rows.checked != (self.task, self.outputs):
                self._check_values(split, rows)
                object.__setattr__(rows, "checked", (self.task, self.outputs))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train.x.shape[1:])

    def only(self, clients: Sequence[int]) -> FederatedData:
        """The data of some clients."""
        rows = {split: getattr(self, split).only(clients) for split in SPLITS}
        return replace(self, clients=tuple(self.clients[c] for c in clients), **rows)

    def on(self, device: torch.device) -> FederatedData:
        """The same data on a device."""
        return replace(self, train=self.train.on(device), val=self.val.on(device), test=self.test.on(device))

    def to(self, dtype: torch.dtype) -> FederatedData:
        """The same data with floating-point numbers of another width."""
        return replace(self, train=self.train.to(dtype), val=self.val.to(dtype), test=self.test.to(dtype))

    def _check_names(self) -> None:
        if not self.clients:
            raise DataError(f"{self.name}: has no clients")
        if twice := [client for client, count in Counter(self.clients).items() if count > 1]:
            raise DataError(f'{self.name}: several clients are called "{twice[0]}"; each needs a name of its own')
        if self.task not in ("classification", "regression"):
            raise DataError(f'{self.name}: task "{self.task}" is neither classification nor regression')
        if self.classes and len(self.classes) != self.outputs:
            raise DataError(f"{self.name}: {len(self.classes)} names of classes for {self.outputs} outputs")
        if self.features and self.shape != (len(self.features),):
            raise DataError(
                f"{self.name}: {len(self.features)} names of features for samples of shape {list(self.shape)}"
            )

    def _check_form(self, split: str, rows: Rows) -> None:
        """Types and sizes, which are looked at without reading a sample."""
        x, y, starts, where = rows.x, rows.y, rows.starts, f"{self.name}, {split}"
        if starts.dtype != torch.int64 or starts.shape != (len(self.clients) + 1,):
            form = f"{starts.dtype} {list(starts.shape)}"
            raise DataError(f"{where}: starts must be int64 [{len(self.clients) + 1}], clients + 1, and is {form}")
        if rows.is_here and (int(starts[0]), int(starts[-1])) != (0, len(x)):
            ends = f"{int(starts[0])} to {int(starts[-1])}"
            raise DataError(f"{where}: starts must go from 0 to the number of rows, {len(x)}, and goes from {ends}")
        if (starts.diff() < 0).any():
            client = self.clients[int((starts.diff() < 0).nonzero()[0])]
            raise DataError(f'{where}: starts must not decrease, and does after client "{client}"')
        if len(x) != len(y):
            raise DataError(f"{where}: x has {len(x)} rows and y has {len(y)}")
        if not x.is_floating_point() and x.dtype != torch.int64:
            raise DataError(
                f"{where}: x is {x.dtype}; scale images to floating point, as in x.float() / 255, "
                "and give the characters of a text as int64"
            )
        if (x.shape[1:], x.dtype) != (self.train.x.shape[1:], self.train.x.dtype):
            here, there = (f"{v.dtype} {list(v.shape[1:])}" for v in (x, self.train.x))
            raise DataError(f"{where}: samples are {here}, in training they are {there}")
        if self.task == "classification":
            wanted, fits = "int64 [rows]", y.dtype == torch.int64 and y.dim() == 1
        else:
            wanted = f"floating point [rows, {self.outputs}]"
            fits = y.is_floating_point() and y.shape[1:] == (self.outputs,)
        if not fits:
            raise DataError(f"{where}: y of {self.task} must be {wanted}, and is {y.dtype} {list(y.shape)}")

    def _check_values(self, split: str, rows: Rows) -> None:
        """One pass over the samples; a second one only to say where it is wrong."""
        for name, v in (("x", rows.x), ("y", rows.y)):
            if v.is_floating_point() and v.numel() and not torch.stack(torch.aminmax(v)).isfinite().all():
                wrong = ~v.isfinite().flatten(1).all(1) if v.dim() > 1 else ~v.isfinite()
                raise DataError(
                    f"{self._where(split, rows, wrong)}: {name} is NaN or Inf as {v.dtype}; fill, scale or remove it"
                )
        if self.task == "classification" and len(rows.y):
            least, largest = (int(v) for v in torch.aminmax(rows.y))
            if least < 0 or largest >= self.outputs:
                wrong = (rows.y < 0) | (rows.y >= self.outputs)
                label = int(rows.y[wrong][0])
                raise DataError(
                    f"{self._where(split, rows, wrong)}: the label {label} is none of the {self.outputs} classes, "
                    f"which are numbered 0 to {self.outputs - 1}"
                )

    def _where(self, split: str, rows: Rows, wrong: Tensor) -> str:
        """The first row that is wrong, for people."""
        row = int(wrong.nonzero()[0])
        client = int(torch.searchsorted(rows.starts, row, right=True)) - 1
        return f'{self.name}: client "{self.clients[client]}", {split}, row {row - int(rows.starts[client]) + 1}'
