"""Image sources: digits, MNIST, Fashion-MNIST and CIFAR-10, dealt by a partition; QMNIST, one client per writer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.data import partitions
from fedtailor.data.configs import (
    Cifar10Config,
    DigitsConfig,
    FashionMnistConfig,
    MnistConfig,
    PartitionConfig,
    QmnistConfig,
    SplitConfig,
)
from fedtailor.data.corruptions import corrupt_clients
from fedtailor.data.files import check_labels, data_root, locate, read_cifar, read_idx
from fedtailor.data.splits import Indices, client_names, gather, split, split_note
from fedtailor.errors import DataError

DIGITS = tuple(str(k) for k in range(10))
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_TEST = {"train": ("train",), "test": ("test",), "all": ("train", "test")}


@dataclass(frozen=True)
class Pool:
    """All images of a source before they are dealt; x in float is `(images * scale - mean) / sd`."""

    images: NDArray[np.uint8]  # [samples, channels, height, width]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    scale: float = 1 / 255
    mean: float = 0.5
    sd: float = 0.5
    dtype: torch.dtype = torch.float32

    def convert(self, index: Indices) -> tuple[Tensor, Tensor]:
        """Features and targets of some samples; only those become floats, the pool may be large."""
        x = torch.from_numpy(self.images[index]).to(self.dtype)
        return x.mul_(self.scale).sub_(self.mean).div_(self.sd), torch.from_numpy(self.labels[index])

    @property
    def note(self) -> str:
        """How pixels were scaled."""
        if (self.mean, self.sd) == (0.0, 1.0):
            return "pixels scaled to [0, 1]"
        return f"pixels scaled to [0, 1], then (x - {self.mean}) / {self.sd}"


def load(
    config: PartitionConfig | QmnistConfig, *, seed: int, root: Path | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Read, deal and split the images that a configuration asks for."""
    folder = data_root(root)
    match config:
        case QmnistConfig():
            return _qmnist(config, seed, folder, dtype)
        case DigitsConfig():
            pool = _digits()
        case MnistConfig():
            pool = mnist(folder, "MNIST", config.source, config.use, DIGITS)
        case FashionMnistConfig():
            pool = mnist(folder, "FashionMNIST", config.source, config.use, CLOTHES)
        case Cifar10Config():
            pool = _cifar10(folder, config.use)
        case _:
            raise TypeError(f"not an image source: {config!r}")
    return deal(config.source, replace(pool, dtype=dtype), config, seed)


def deal(name: str, pool: Pool, config: PartitionConfig, seed: int) -> FederatedData:
    """Clients by a partition, some with other names of classes, or each with its own corruption of the images."""
    parts = partitions.partition(pool.labels, config, seed)
    notes = (f"partition: {config.partition}", *partitions.describe(parts, pool.labels))
    data = assemble(name, pool, parts, client_names(len(parts)), config, seed, notes)
    if config.permuted:
        data = permute_labels(data, config.permuted, seed)
    if config.corruption is not None:
        data = corrupt_clients(data, config.corruption, config.severity, seed, mean=pool.mean, sd=pool.sd)
    return data


def permute_labels(data: FederatedData, fraction: float, seed: int) -> FederatedData:
    """Concept shift: the clients drawn give the classes other names, all of them the same ones."""
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


class Pooled(Protocol):
    """Labelled samples that are dealt to clients: `convert` makes tensors of some of them."""

    @property
    def labels(self) -> NDArray[np.int64]: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def note(self) -> str: ...

    def convert(self, index: Indices, /) -> tuple[Tensor, Tensor]: ...


def assemble(
    name: str,
    pool: Pooled,
    parts: list[Indices],
    clients: tuple[str, ...],
    config: SplitConfig,
    seed: int,
    notes: tuple[str, ...],
) -> FederatedData:
    """Split every client's part of the pool."""
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


@cache
def _digits() -> Pool:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8).reshape(-1, 1, 8, 8)
    return Pool(images, bunch.target.astype(np.int64), DIGITS, scale=1 / 16, mean=0.0, sd=1.0)


def mnist(root: Path, folder: str, source: str, use: str, classes: tuple[str, ...]) -> Pool:
    images, labels = [], []
    for part in TRAIN_TEST[use]:
        stem = {"train": "train", "test": "t10k"}[part]
        image_file = locate(root, f"{folder}/raw/{stem}-images-idx3-ubyte.gz", source)
        label_file = locate(root, f"{folder}/raw/{stem}-labels-idx1-ubyte.gz", source)
        images.append(read_idx(image_file, 3))
        labels.append(check_labels(label_file, read_idx(label_file, 1)))
        _same_count(image_file, images[-1], label_file, labels[-1])
    x = np.concatenate(images)
    return Pool(x[:, None], np.concatenate(labels).astype(np.int64), classes)


def _cifar10(root: Path, use: str) -> Pool:
    stems = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    files = [
        read_cifar(locate(root, f"cifar-10-batches-bin/{stem}.bin", "cifar10"))
        for part in TRAIN_TEST[use]
        for stem in stems[part]
    ]
    images, labels = zip(*files, strict=True)
    return Pool(np.concatenate(images), np.concatenate(labels).astype(np.int64), OBJECTS)


def _qmnist(config: QmnistConfig, seed: int, root: Path, dtype: torch.dtype) -> FederatedData:
    pool = replace(mnist(root, "MNIST", "qmnist", config.use, DIGITS), dtype=dtype)
    writers = _writers(root, pool, config.use)
    ids, counts = np.unique(writers, return_counts=True)
    eligible = ids[counts >= config.min_samples]
    if len(eligible) < config.clients:
        raise DataError(
            f"data.clients = {config.clients}: only {len(eligible)} of {len(ids)} writers have at least "
            f"{config.min_samples} images; lower data.clients or data.min_samples"
        )
    chosen = np.sort(stream(seed, "qmnist", "writers").permutation(eligible)[: config.clients])
    by_writer = dict(zip(ids.tolist(), partitions.natural(writers), strict=True))
    parts = [by_writer[writer] for writer in chosen.tolist()]
    names = tuple(f"writer-{writer:04d}" for writer in chosen.tolist())
    notes = (
        f"partition: by writer, {config.clients} of the {len(eligible)} with at least {config.min_samples} images",
        *partitions.describe(parts, pool.labels),
    )
    return assemble(config.source, pool, parts, names, config, seed, notes)


def _writers(root: Path, pool: Pool, use: str) -> NDArray[np.int64]:
    """Writer of each pooled MNIST image; QMNIST's rows are in MNIST's order (of its test rows, the first ones)."""
    writers: list[NDArray[np.int64]] = []
    rest = pool.labels
    for part in TRAIN_TEST[use]:
        path = locate(root, f"QMNIST/raw/qmnist-{part}-labels-idx2-int.gz", "qmnist")
        table = read_idx(path, 2)
        images = len(rest) if part == TRAIN_TEST[use][-1] else len(table)
        labels, rest = rest[:images], rest[images:]
        if table.shape[1] < 3 or len(table) < images or not np.array_equal(table[: len(labels), 0], labels):
            raise DataError(f"{path}: its labels are not those of the MNIST files; fetch both again")
        writers.append(table[: len(labels), 2].astype(np.int64))
    return np.concatenate(writers)


def _same_count(image_file: Path, images: NDArray[Any], label_file: Path, labels: NDArray[Any]) -> None:
    if len(images) != len(labels):
        raise DataError(
            f"{label_file}: {len(labels)} labels for the {len(images)} images of {image_file.name}; fetch both again"
        )
