"""Batches as row numbers: drawn before the first step, so that a client's work is a function of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.trees import Tree, tree_map

T = TypeVar("T")
PINNED = ("cuda", "xpu")  # devices that fetch pinned memory of the host by themselves
Orders = Sequence[np.ndarray]  # one order of the rows 0..n-1 per pass over the data


@dataclass(frozen=True)
class Batch:
    """Rows of one step: `[batch]` for one client, `[clients, batch]` for a stack."""

    rows: Tensor
    weight: Tensor | None = None  # 1 for a sample, 0 for padding; None where nothing is padded
    active: Tensor | None = None  # clients that take this step; None where all do
    drawn: Tensor | None = None  # three numbers per row for `augment`; None where images stay as they are
    index: Tensor | None = None  # the rows as their client counts them, from 0; only for a loss that asks
    places: Tensor | None = None  # of its rows in a `PerSample`; of padding, one that is nobody's

    def part(self, first: int, last: int) -> Batch:
        by_row = {k: getattr(self, k) for k in ("rows", "weight", "index", "places")}
        cut_out: dict[str, Any] = {k: None if v is None else v[..., first:last] for k, v in by_row.items()}
        return replace(self, **cut_out, drawn=None if self.drawn is None else self.drawn[..., first:last, :])


def spans(rows: int, size: int, least: int = 1) -> list[tuple[int, int]]:
    """A batch in pieces of `size` rows, as gradients are accumulated over them: where each begins and ends."""
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in cut(np.arange(rows), size, least)]


class PerSample:
    """A tensor for each of some rows, 0 to begin with, that lasts from one step to the next."""

    def __init__(self, places: int, shape: Sequence[int], like: Tensor) -> None:
        self.values = like.new_zeros(places, *shape)

    def read(self, batch: Batch) -> Tensor:
        assert batch.places is not None
        return self.values[batch.places]

    def write(self, batch: Batch, values: Tensor) -> None:
        """Replace those of a batch; what padding leaves, nobody reads."""
        assert batch.places is not None
        self.values[batch.places] = values


def with_places(batches: Sequence[Batch]) -> tuple[list[Batch], int]:
    """The batches with the places of their rows, and how many there are: one for each row, and one for padding."""
    known = torch.cat([b.rows.flatten() for b in batches]).unique()  # in order
    out = []
    for batch in batches:
        places = torch.searchsorted(known, batch.rows.contiguous())
        places = places if batch.weight is None else torch.where(batch.weight > 0, places, len(known))
        out.append(replace(batch, places=places))
    return out, len(known) + 1


def on_device(batches: Sequence[Batch], device: torch.device, data: torch.device) -> Sequence[Batch]:
    """The batches where the model is, but rows where the data are.

    One copy for all tensors of a kind, whatever the number of steps.
    """
    if device.type == "cpu" or not batches:
        return batches
    names = ("rows", "weight", "active", "drawn", "index", "places")
    columns = {k: [getattr(batch, k) for batch in batches] for k in names}
    moved: dict[str, Any] = {k: _move(values, data if k == "rows" else device) for k, values in columns.items()}
    return [replace(batch, **{k: values[i] for k, values in moved.items()}) for i, batch in enumerate(batches)]


def _move(values: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    given = [v for v in values if v is not None]
    if not given or given[0].device == device:
        return list(values)
    flat = torch.cat([v.reshape(-1) for v in given]).to(device)
    each = iter(flat.split([v.numel() for v in given]))
    return [None if v is None else next(each).reshape(v.shape) for v in values]


def cut(order: np.ndarray, batch_size: int, least: int = 1) -> list[np.ndarray]:
    """One pass in batches; the last may be short, and joins the one before it when shorter than `least`."""
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    if len(batches) > 1 and len(batches[-1]) < least:
        batches[-2:] = [order[batch_size * (len(batches) - 2) :]]
    return batches


def orders_of(
    rng: np.random.Generator, n: int, epochs: int, steps: int, batch_size: int, least: int = 1
) -> list[np.ndarray]:
    """Passes over n samples: one for each epoch or, if an epoch is so many steps, as many as these take."""
    if not steps or not n:
        return [rng.permutation(n) for _ in range(epochs)]
    each = len(cut(np.arange(n), batch_size, least))
    whole, rest = divmod(epochs * steps, each)
    orders = [rng.permutation(n) for _ in range(whole)]
    return [*orders, rng.permutation(n)[: rest * batch_size]] if rest else orders


def single(start: int, orders: Orders, batch_size: int, least: int = 1) -> list[Batch]:
    return [Batch(torch.from_numpy(batch + start)) for order in orders for batch in cut(order, batch_size, least)]


def stacked(
    starts: Sequence[int], orders: Sequence[Orders], batch_size: int, dtype: torch.dtype, least: int = 1
) -> list[Batch]:
    """The batches of many clients side by side, padded to the longest of a step; some clients may stop early."""
    if len({len(passes) for passes in orders}) == len({len(order) for passes in orders for order in passes}) == 1:
        return _unpadded(starts, orders, batch_size, least)
    batches = [[batch for order in passes for batch in cut(order, batch_size, least)] for passes in orders]
    steps = max(map(len, batches), default=0)
    width = max((len(batch) for own in batches for batch in own), default=0)
    rows = np.empty((len(starts), steps, width), dtype=np.int64)
    rows[:] = np.asarray(starts)[:, None, None]
    filled = np.zeros((len(starts), steps), dtype=np.int64)
    for client, own in enumerate(batches):
        for step, batch in enumerate(own):
            rows[client, step, : len(batch)] += batch
            filled[client, step] = len(batch)
    out = []
    for step in range(steps):
        here, longest = filled[:, step], filled[:, step].max()
        weight = torch.from_numpy(np.arange(longest) < here[:, None]).to(dtype) if (here < longest).any() else None
        active = torch.from_numpy(here > 0) if (here == 0).any() else None
        out.append(Batch(torch.from_numpy(rows[:, step, :longest]), weight, active))
    return out


def _unpadded(starts: Sequence[int], orders: Sequence[Orders], batch_size: int, least: int) -> list[Batch]:
    """The batches of clients with equally many samples and passes."""
    rows = np.asarray(orders) + np.asarray(starts)[:, None, None]
    _, passes, samples = rows.shape
    spans = [(part[0], part[-1] + 1) for part in cut(np.arange(samples), batch_size, least)]
    return [Batch(torch.from_numpy(rows[:, i, first:last])) for i in range(passes) for first, last in spans]


def with_draws(batches: Sequence[Batch], draws: Sequence[Orders], batch_size: int, least: int = 1) -> list[Batch]:
    """The batches with what was drawn for each of their samples; draws are in the order of the rows of a pass."""
    cuts = [[part for drawn in passes for part in cut(drawn, batch_size, least)] for passes in draws]
    out = []
    for step, batch in enumerate(batches):
        drawn = np.zeros((len(cuts), batch.rows.shape[-1], 3), dtype=np.int64)
        for client, own in enumerate(cuts):
            if step < len(own):
                drawn[client, : len(own[step])] = own[step]
        out.append(replace(batch, drawn=torch.from_numpy(drawn).reshape(*batch.rows.shape, 3)))
    return out


def whole(starts: Sequence[int], sizes: Sequence[int], batch_size: int, dtype: torch.dtype) -> list[Batch]:
    """Every row once, in order: for evaluation and full-data views of a stack of clients."""
    orders = [[np.arange(n)] if n else [] for n in sizes]
    return stacked(starts, orders, batch_size, dtype)


def ahead(batches: Sequence[Batch], load: Callable[[Batch], T], *, is_apart: bool) -> Iterator[tuple[Batch, T]]:
    """Each batch with its samples; from data that lie apart from the model, the next ones are on their way already."""
    if not is_apart:
        yield from ((batch, load(batch)) for batch in batches)
        return
    waiting: tuple[Batch, T] | None = None
    for batch in batches:
        coming = batch, load(batch)
        if waiting is not None:
            yield waiting
        waiting = coming
    if waiting is not None:
        yield waiting


def send_samples(samples: Tree, device: torch.device) -> Tree:
    """Samples from the host to the device, while it computes."""

    def sent(v: Tensor) -> Tensor:
        return (v.pin_memory() if device.type in PINNED else v).to(device, non_blocking=True)

    return tree_map(lambda v: v if v.device == device else sent(v), samples)
