"""Pools of labelled samples, distributed over clients and split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.data import partitions
from fedtailor.data.configs import (
    PartitionConfig,
    SplitConfig,
)
from fedtailor.data.corruptions import corrupt_clients
from fedtailor.data.splits import Indices, client_names, gather, split, split_note

TRAIN_TEST = {"train": ("train",), "test": ("test",), "all": ("train", "test")}


@dataclass(frozen=True)
class ImagePool:
    """All images of a source; a sample is `(image * scale - mean) / sd`."""

    images: NDArray[np.uint8]  # [samples, channels, height, width]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    scale: float = 1 / 255
    mean: float = 0.5
    sd: float = 0.5
    dtype: torch.dtype = torch.float32

    def convert(self, index: Indices) -> tuple[Tensor, Tensor]:
        """Features and targets of some samples."""
        x = torch.from_numpy(self.images[index]).to(self.dtype)
        return x.mul_(self.scale).sub_(self.mean).div_(self.sd), torch.from_numpy(self.labels[index])

    @property
    def note(self) -> str:
        if (self.mean, self.sd) == (0.0, 1.0):
            return "pixels scaled to [0, 1]"
        return f"pixels scaled to [0, 1], then (x - {self.mean}) / {self.sd}"


def deal_pool(name: str, pool: ImagePool, config: PartitionConfig, seed: int) -> FederatedData:
    """Distribute a pool by a partition, with permuted labels or corrupted images if configured."""
    parts = partitions.partition(pool.labels, config, seed)
    notes = (f"partition: {config.partition}", *partitions.describe(parts, pool.labels))
    data = split_pool(name, pool, parts, client_names(len(parts)), config, seed, notes)
    if config.permuted:
        data = permute_labels(data, config.permuted, seed)
    if config.corruption is not None:
        data = corrupt_clients(data, config.corruption, config.severity, seed, mean=pool.mean, sd=pool.sd)
    return data


def permute_labels(data: FederatedData, fraction: float, seed: int) -> FederatedData:
    """Concept shift: a random fraction of clients has its labels permuted, all by the same permutation."""
    rng = stream(seed, "permuted")
    chosen = np.sort(rng.permutation(len(data.clients))[: round(fraction * len(data.clients))]).tolist()
    cycle = torch.from_numpy(rng.permutation(data.outputs))  # every label moves to the next one
    renamed = torch.empty_like(cycle)
    renamed[cycle] = cycle.roll(1)

    def permute(rows: Rows) -> Rows:
        y = rows.y.clone()
        for i in chosen:
            start, end = int(rows.starts[i]), int(rows.starts[i + 1])
            y[start:end] = renamed[y[start:end]]
        return replace(rows, y=y)

    note = f"labels permuted at {len(chosen)} clients: {', '.join(data.clients[i] for i in chosen)}"
    return replace(
        data,
        train=permute(data.train),
        val=permute(data.val),
        test=permute(data.test),
        notes=(*data.notes, note),
    )


class SamplePool(Protocol):
    """Labelled samples; `convert` returns some of them as tensors."""

    @property
    def labels(self) -> NDArray[np.int64]: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def note(self) -> str: ...

    def convert(self, index: Indices, /) -> tuple[Tensor, Tensor]: ...


def split_pool(
    name: str,
    pool: SamplePool,
    parts: list[Indices],
    clients: tuple[str, ...],
    config: SplitConfig,
    seed: int,
    notes: tuple[str, ...],
) -> FederatedData:
    cuts = [
        split(len(part), pool.labels[part], config, seed=seed, client=client)
        for client, part in zip(clients, parts, strict=True)
    ]
    return FederatedData(
        name=name,
        task="classification",
        clients=clients,
        train=gather(parts, [cut.train for cut in cuts], pool.convert),
        val=gather(parts, [cut.val for cut in cuts], pool.convert),
        test=gather(parts, [cut.test for cut in cuts], pool.convert),
        outputs=len(pool.classes),
        classes=pool.classes,
        notes=(*notes, split_note(config), pool.note),
    )
