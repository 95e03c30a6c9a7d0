"""CIFAR-100: a partition of its 100 classes, or superclasses as labels with different classes at each client."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData
from fedtailor.core.random import stream
from fedtailor.data import partitions
from fedtailor.data.configs import Cifar100Config
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import check_labels, read_bytes
from fedtailor.data.pools import TRAIN_TEST, ImagePool, deal_pool, split_pool
from fedtailor.data.splits import client_names
from fedtailor.errors import DataError

FOLDER, RECORD = "cifar-100-binary", 2 + 3 * 32 * 32  # superclass, class, pixels
SUPERCLASSES, CLASSES = 20, 100


def load(
    config: Cifar100Config, *, seed: int, root: Path | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Read, distribute and split the images of a configuration."""
    folder = data_root(root)
    files = [locate(folder, f"{FOLDER}/{part}.bin", config.source) for part in TRAIN_TEST[config.use]]
    coarse, fine, images = (np.concatenate(x) for x in zip(*map(read, files), strict=True))
    names = tuple(_names(folder, "coarse" if config.members else "fine"))
    pool = ImagePool(images, coarse if config.members else fine, names, dtype=dtype)
    if not config.members:
        return deal_pool(config.source, pool, config, seed)
    parts = by_members(coarse, fine, config.clients, config.members, seed)
    notes = (f"partition: {config.members} classes of each superclass", *partitions.describe(parts, fine))
    return split_pool(config.source, pool, parts, client_names(len(parts)), config, seed, notes)


def read(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Superclasses, classes and images [records, 3, 32, 32] of a binary file of any number of records."""
    content = np.frombuffer(read_bytes(path), np.uint8)
    if not len(content) or len(content) % RECORD:
        raise DataError(f"{path}: has {len(content)} bytes, not records of {RECORD}; remove it and fetch it again")
    records = content.reshape(-1, RECORD)
    coarse, fine = check_labels(path, records[:, 0], SUPERCLASSES), check_labels(path, records[:, 1], CLASSES)
    return coarse.astype(np.int64), fine.astype(np.int64), records[:, 2:].reshape(-1, 3, 32, 32)


def by_members(
    coarse: NDArray[np.int64], fine: NDArray[np.int64], clients: int, members: int, seed: int
) -> list[NDArray[np.int64]]:
    """Give each client `members` classes of every superclass, and an equal share of each with its other holders."""
    held: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for k in np.unique(coarse).tolist():
        rows = np.flatnonzero(coarse == k)
        drawn = int(stream(seed, "superclass", k).integers(2**31))
        for own, part in zip(held, partitions.classes(fine[rows], clients, drawn, members), strict=True):
            own.append(rows[part])
    return [np.sort(np.concatenate(own)) for own in held]


def _names(root: Path, kind: str) -> list[str]:
    path = locate(root, f"{FOLDER}/{kind}_label_names.txt", "cifar100")
    return path.read_text(encoding="utf-8").split()
