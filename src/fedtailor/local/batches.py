"""Batches as row numbers: drawn before the first step, so that a client's work is a function of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Orders = Sequence[np.ndarray]  # one order of the rows 0..n-1 per pass over the data


@dataclass(frozen=True)
class Batch:
    """Rows of one step: `[batch]` for one client, `[clients, batch]` for a stack."""

    rows: Tensor
    weight: Tensor | None = None  # 1 for a sample, 0 for padding; None where nothing is padded
    active: Tensor | None = None  # clients that take this step; None where all do


def single(start: int, orders: Orders, batch_size: int) -> list[Batch]:
    """One client's batches; the last of a pass may be short."""
    return [
        Batch(torch.from_numpy(order[i : i + batch_size] + start))
        for order in orders
        for i in range(0, len(order), batch_size)
    ]


def stacked(starts: Sequence[int], orders: Sequence[Orders], batch_size: int, dtype: torch.dtype) -> list[Batch]:
    """The batches of many clients side by side; short batches are padded, clients with fewer steps stop early."""
    clients = len(starts)
    steps = [sum(-(-len(order) // batch_size) for order in passes) for passes in orders]
    width = min(batch_size, max((len(order) for passes in orders for order in passes), default=1))
    rows = np.repeat(np.asarray(starts)[:, None, None], max(steps, default=0), axis=1).repeat(width, axis=2)
    weight = np.zeros(rows.shape, dtype=bool)
    for client, passes in enumerate(orders):
        step = 0
        for order in passes:
            for i in range(0, len(order), batch_size):
                batch = order[i : i + batch_size]
                rows[client, step, : len(batch)] += batch
                weight[client, step, : len(batch)] = True
                step += 1
    all_rows, all_weight = torch.from_numpy(rows), torch.from_numpy(weight)
    out = []
    for step in range(rows.shape[1]):
        here = all_weight[:, step]
        active = here[:, 0]
        out.append(
            Batch(
                all_rows[:, step],
                None if bool(here.all()) else here.to(dtype),
                None if bool(active.all()) else active,
            )
        )
    assert all(len(b.rows) == clients for b in out)
    return out


def whole(starts: Sequence[int], sizes: Sequence[int], batch_size: int, dtype: torch.dtype) -> list[Batch]:
    """Every row once, in order: for evaluation and full-data views of a stack of clients."""
    orders = [[np.arange(n)] if n else [] for n in sizes]
    return stacked(starts, orders, batch_size, dtype)
