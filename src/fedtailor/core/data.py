"""What every data source ends in: the rows of all clients one after another, cut into train, val and test.

Samples are tensors, named tensors, or stored elsewhere and read when they are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedtailor.core.segmentation import VOID
from fedtailor.core.task import IGNORED, TargetKind
from fedtailor.core.trees import Tree, items, leaves, to_device, tree_map
from fedtailor.errors import DataError, nearest

KINDS = ("classification", "multilabel", "regression", "count", "survival", "tokens", "segmentation", "own")
Shape = Any  # of one sample: tuple[int, ...], or by name where it has several parts
SPLITS = ("train", "val", "test")
Inputs = Any  # Tensor | dict[str, Tensor] | Stored


class Stored(Protocol):
    """Samples that lie elsewhere and are read by number: a file, or a Dataset of the user's."""

    def __len__(self) -> int: ...

    def read(self, rows: Tensor) -> Tree:
        """The samples of these numbers, as a tensor or as named tensors; never kept."""

    def to(self, dtype: torch.dtype) -> Stored:
        """The same with floating-point numbers of another width."""


def count(x: Inputs | Tree) -> int:
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
    """Samples of all clients, client after client.

    Args:
        x: [rows, ...] floating point, or int64 for text; a dict of such tensors is passed to the model as keywords.
        y: Targets, in the form that the task expects.
        starts: [clients + 1] int64; the samples of client i are `starts[i]:starts[i + 1]`.
        is_here: False if only the number of rows is known here, and x and y are examples of one sample.
    """

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
        return {"x": self.x, "y": self.y} if self.in_memory else {"y": self.y}

    def bounds(self, clients: Sequence[int]) -> tuple[list[int], list[int]]:
        """The first row and the number of rows of each of `clients`."""
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
        return self.y[int(self.starts[client]) : int(self.starts[client + 1])]

    def only(self, clients: Sequence[int]) -> Rows:
        firsts, sizes = self.bounds(clients)
        here = self.starts.device
        at = torch.cat([torch.arange(a, a + n, device=here) for a, n in zip(firsts, sizes, strict=True)])
        x = take(self.x, at) if self.in_memory else Chosen(self.x, at)
        return self._checked_as(
            replace(self, x=x, y=take(self.y, at), starts=self.starts.new_tensor([0, *sizes]).cumsum(0))
        )

    def on(self, device: torch.device) -> Rows:
        """The same rows on a device, or read to it; `starts` stays on the host."""
        x = to_device(self.x, device) if self.in_memory else OnDevice(self.x, device)
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
        return to_device(self.whole.read(rows), self.device)

    def to(self, dtype: torch.dtype) -> OnDevice:
        return OnDevice(self.whole.to(dtype), self.device)


def _flat(tensors: dict[str, Tree]) -> list[Tensor]:
    return [v for part in tensors.values() for v in (part.values() if isinstance(part, dict) else [part])]


@dataclass(frozen=True)
class FederatedData:
    """The data of a federation: clients, samples and task. `fedtailor.federated` builds it from arrays and frames.

    Args:
        name: What it is called in messages and reports.
        task: The kind of target, such as "classification".
        clients: Names, each once.
        train: Training rows of all clients.
        val: Validation rows; may be empty for a client.
        test: Test rows; may be empty for a client.
        outputs: Number of classes or target columns.
        classes: Names of the classes, in the order of their numbers.
        features: Names of the columns of x.
        notes: How the data was prepared and split; printed and stored with a run.
        preparation: Of tables: how new rows are prepared.

    Raises:
        DataError: The parts do not fit together, or a sample cannot be learned from; names the client and row.
    """

    name: str
    task: TargetKind
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
    def shape(self) -> Shape:
        """Shape of one sample; by name where samples have several parts."""
        shapes: Shape = tree_map(lambda v: tuple(v.shape[1:]), self.train.first(1))
        return shapes

    @property
    def is_plain(self) -> bool:
        """Whether a sample is one tensor."""
        return isinstance(self.train.first(1), Tensor)

    def only(self, clients: Sequence[int]) -> FederatedData:
        """The data of some clients.

        Args:
            clients: Their positions in `clients`.

        Returns:
            Data with only these clients.
        """
        rows = {split: getattr(self, split).only(clients) for split in SPLITS}
        return replace(self, clients=tuple(self.clients[c] for c in clients), **rows)

    def on(self, device: torch.device) -> FederatedData:
        """The same data on a device.

        Args:
            device: Where the tensors shall be.

        Returns:
            Data on the device; what is read from files is moved when it is read.
        """
        return replace(self, train=self.train.on(device), val=self.val.on(device), test=self.test.on(device))

    def to(self, dtype: torch.dtype) -> FederatedData:
        """The same data with another floating-point type.

        Args:
            dtype: Such as torch.float64.

        Returns:
            Data with its floating-point tensors in that type; whole numbers stay as they are.
        """
        return replace(self, train=self.train.to(dtype), val=self.val.to(dtype), test=self.test.to(dtype))

    def _check_names(self) -> None:
        if not self.clients:
            raise DataError(f"{self.name}: has no clients")
        if twice := [client for client, count in Counter(self.clients).items() if count > 1]:
            raise DataError(f'{self.name}: several clients are called "{twice[0]}"; each needs a name of its own')
        if self.task not in KINDS:
            raise DataError(f'{self.name}: no task "{self.task}"; {nearest(self.task, KINDS)}')
        if self.classes and len(self.classes) != self.outputs:
            raise DataError(f"{self.name}: {len(self.classes)} names of classes for {self.outputs} outputs")
        if self.features and self.shape != (len(self.features),):
            raise DataError(f"{self.name}: {len(self.features)} names of features for samples of shape {self.shape}")

    def _check_form(self, split: str, rows: Rows) -> None:
        """Types and sizes, which are looked at without reading a sample."""
        samples, y, starts, where = count(rows.x), rows.y, rows.starts, f"{self.name}, {split}"
        if starts.dtype != torch.int64 or starts.shape != (len(self.clients) + 1,):
            form = f"{starts.dtype} {list(starts.shape)}"
            raise DataError(f"{where}: starts must be int64 [{len(self.clients) + 1}], clients + 1, and is {form}")
        if rows.is_here and (int(starts[0]), int(starts[-1])) != (0, samples):
            ends = f"{int(starts[0])} to {int(starts[-1])}"
            raise DataError(f"{where}: starts must go from 0 to the number of rows, {samples}, and goes from {ends}")
        if (starts.diff() < 0).any():
            client = self.clients[int((starts.diff() < 0).nonzero()[0])]
            raise DataError(f'{where}: starts must not decrease, and does after client "{client}"')
        if samples != len(y):
            raise DataError(f"{where}: x has {samples} rows and y has {len(y)}")
        if rows.in_memory or samples:
            is_known = self.train.in_memory or count(self.train.x)
            self._check_inputs(where, rows.first(1), self.train.first(1) if is_known else None)
        wanted, fits = self._target_form(y)
        if not fits:
            raise DataError(f"{where}: y of {self.task} must be {wanted}, and is {y.dtype} {list(y.shape)}")
        if self.task == "segmentation" and samples:
            x = next(iter(dict(items({"x": rows.first(1)})).values()))
            if x.shape[2:] != y.shape[1:]:
                raise DataError(f"{where}: images are {list(x.shape[2:])} and masks {list(y.shape[1:])}")

    def _check_inputs(self, where: str, x: Tree, training: Tree) -> None:
        parts, known = dict(items({"x": x})), dict(items({"x": training}))
        for name, v in parts.items():
            allowed = (torch.int64,) if isinstance(x, Tensor) else (torch.int64, torch.bool)
            if not v.is_floating_point() and v.dtype not in allowed:
                raise DataError(
                    f"{where}: {name} is {v.dtype}; scale images to floating point, as in x.float() / 255, "
                    "and give the characters or tokens of a text as int64"
                )
            if training is not None and name not in known:
                raise DataError(f"{where}: {name} is not in the training samples; {nearest(name, known)}")
            if training is not None and not self._is_alike(v, known[name]):
                here, before = (f"{t.dtype} {list(t.shape[1:])}" for t in (v, known[name]))
                what = "" if name == "x" else f"{name}: "
                raise DataError(f"{where}: {what}samples are {here}, in training they are {before}")
        if missing := sorted(known.keys() - parts.keys()):
            raise DataError(f"{where}: samples have no {missing[0]}, in training they have")

    def _is_alike(self, v: Tensor, training: Tensor) -> bool:
        """Whether samples are as in training; whole images may be larger than the patches of training."""
        channels = slice(1, 2 if self.task == "segmentation" else None)
        known = (training.shape[channels], training.dim(), training.dtype)
        return (v.shape[channels], v.dim(), v.dtype) == known

    def _target_form(self, y: Tensor) -> tuple[str, bool]:
        """What targets must look like, in words, and whether they do."""
        columns = 2 if self.task == "survival" else self.outputs
        return {
            "classification": ("int64 [rows]", y.dtype == torch.int64 and y.dim() == 1),
            "tokens": ("int64 [rows, tokens]", y.dtype == torch.int64 and y.dim() == 2),
            "count": (f"int64 [rows, {columns}]", y.dtype == torch.int64 and y.shape[1:] == (columns,)),
            "segmentation": (
                "uint8 [rows, height, width] or [rows, depth, height, width]",
                y.dtype == torch.uint8 and y.dim() in (3, 4),
            ),
            "own": ("a tensor", True),
        }.get(self.task, (f"floating point [rows, {columns}]", y.is_floating_point() and y.shape[1:] == (columns,)))

    def _check_values(self, split: str, rows: Rows) -> None:
        """One pass over the samples in memory; a second one only to say where it is wrong."""
        for name, v in items(rows.tensors):
            if v.is_floating_point() and v.numel() and not torch.stack(torch.aminmax(v)).isfinite().all():
                wrong = ~v.isfinite().flatten(1).all(1) if v.dim() > 1 else ~v.isfinite()
                raise DataError(
                    f"{self._where(split, rows, wrong)}: {name} is NaN or Inf as {v.dtype}; fill, scale or remove it"
                )
        y = rows.y
        if not len(y):
            return
        if self.task in ("classification", "tokens"):
            least, largest = (int(v) for v in torch.aminmax(y))
            if least >= 0 and largest < self.outputs:
                return
            wrong = ((y < 0) | (y >= self.outputs)) & ~((y == IGNORED) & (self.task == "tokens"))
            if wrong.any():
                label = int(y[wrong][0])
                raise DataError(
                    f"{self._where(split, rows, wrong)}: the label {label} is none of the {self.outputs} classes, "
                    f"which are numbered 0 to {self.outputs - 1}"
                )
        elif self.task == "segmentation" and (wrong := (y >= self.outputs) & (y != VOID)).any():
            raise DataError(
                f"{self._where(split, rows, wrong)}: the mask has class {int(y[wrong][0])}; there are {self.outputs} "
                f"classes, numbered from 0, and {VOID} for what does not count"
            )
        elif self.task == "multilabel" and (wrong := (y != 0) & (y != 1)).any():
            raise DataError(f"{self._where(split, rows, wrong)}: a label is neither 0 nor 1")
        elif self.task == "count" and (wrong := y < 0).any():
            raise DataError(f"{self._where(split, rows, wrong)}: a count is below 0")
        elif self.task == "survival" and (wrong := (y[:, 0] < 0) | ((y[:, 1] != 0) & (y[:, 1] != 1))).any():
            raise DataError(f"{self._where(split, rows, wrong)}: y must be a time not below 0 and an event, 0 or 1")

    def _where(self, split: str, rows: Rows, wrong: Tensor) -> str:
        row = int(wrong.nonzero()[0, 0])
        client = int(torch.searchsorted(rows.starts, row, right=True)) - 1
        return f'{self.name}: client "{self.clients[client]}", {split}, row {row - int(rows.starts[client]) + 1}'
