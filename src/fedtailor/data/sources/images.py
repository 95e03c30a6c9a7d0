"""Digits, MNIST, Fashion-MNIST and CIFAR-10, distributed by a partition; QMNIST, one client per writer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData
from fedtailor.core.random import stream
from fedtailor.data import partitions
from fedtailor.data.configs import Cifar10Config, DigitsConfig, FashionMnistConfig, MnistConfig, QmnistConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import check_labels, read_cifar, read_idx
from fedtailor.data.pools import TRAIN_TEST, ImagePool, deal_pool, split_pool
from fedtailor.errors import DataError

DIGITS = tuple(str(k) for k in range(10))
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

Dealt = DigitsConfig | MnistConfig | FashionMnistConfig | Cifar10Config


def load(
    config: Dealt | QmnistConfig, *, seed: int, root: Path | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Read, distribute and split the images of a configuration."""
    folder = data_root(root)
    if isinstance(config, QmnistConfig):
        return _qmnist(config, seed, folder, dtype)
    use = "all" if isinstance(config, DigitsConfig) else config.use
    pool = image_pool(config.source, use, folder)
    return deal_pool(config.source, replace(pool, dtype=dtype), config, seed)


def image_pool(source: str, use: str, folder: Path) -> ImagePool:
    match source:
        case "digits":
            return _digits()
        case "mnist":
            return mnist(folder, "MNIST", source, use, DIGITS)
        case "fashion-mnist":
            return mnist(folder, "FashionMNIST", source, use, CLOTHES)
        case _:
            return _cifar10(folder, use)


@cache
def _digits() -> ImagePool:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8).reshape(-1, 1, 8, 8)
    return ImagePool(images, bunch.target.astype(np.int64), DIGITS, scale=1 / 16, mean=0.0, sd=1.0)


def mnist(root: Path, folder: str, source: str, use: str, classes: tuple[str, ...]) -> ImagePool:
    images, labels = [], []
    for part in TRAIN_TEST[use]:
        stem = {"train": "train", "test": "t10k"}[part]
        image_file = locate(root, f"{folder}/raw/{stem}-images-idx3-ubyte.gz", source)
        label_file = locate(root, f"{folder}/raw/{stem}-labels-idx1-ubyte.gz", source)
        images.append(read_idx(image_file, 3))
        labels.append(check_labels(label_file, read_idx(label_file, 1)))
        _same_count(image_file, images[-1], label_file, labels[-1])
    x = np.concatenate(images)
    return ImagePool(x[:, None], np.concatenate(labels).astype(np.int64), classes)


def _cifar10(root: Path, use: str) -> ImagePool:
    stems = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    files = [
        read_cifar(locate(root, f"cifar-10-batches-bin/{stem}.bin", "cifar10"))
        for part in TRAIN_TEST[use]
        for stem in stems[part]
    ]
    images, labels = zip(*files, strict=True)
    return ImagePool(np.concatenate(images), np.concatenate(labels).astype(np.int64), OBJECTS)


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
    return split_pool(config.source, pool, parts, names, config, seed, notes)


def _writers(root: Path, pool: ImagePool, use: str) -> NDArray[np.int64]:
    """Writer of each pooled MNIST image. QMNIST's rows are in MNIST's order; only its first test rows are in MNIST."""
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
