"""The data of the DUW paper: MNIST by its own index lists, and dog breeds distributed like its five clients.

The test set is class-balanced; each client has a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData
from fedtailor.core.random import stream
from fedtailor.data import partitions
from fedtailor.data.configs import DuwMnistConfig, StanfordDogsConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import check_labels, read_bytes, read_npz
from fedtailor.data.pools import TRAIN_TEST
from fedtailor.data.sources.images import DIGITS, mnist
from fedtailor.data.splits import Indices, client_names, gather
from fedtailor.errors import DataError

INDICES = "duw/mnist_client_indices.npz"
FEATURES = "stanford_dogs/dogs_mobilenetv2_u8_100perclass.npz"
TABLE = "stanford_dogs/duw_dogs_5clients_config.json"
KEYS = {
    "I": "5clients_env1",
    "II": "5clients_env2",
    "III": "5clients_env3_4",
    "IV": "5clients_env3_4",
    "two": "2clients",
}
Convert = Callable[[Indices], tuple[Tensor, Tensor]]


def load(
    config: DuwMnistConfig | StanfordDogsConfig,
    *,
    seed: int,
    root: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> FederatedData:
    """Read and distribute the data of a configuration."""
    read: Callable[..., FederatedData] = _mnist if isinstance(config, DuwMnistConfig) else _dogs
    return read(config, seed, data_root(root), dtype)


def _mnist(config: DuwMnistConfig, seed: int, root: Path, dtype: torch.dtype) -> FederatedData:
    parts_of = (mnist(root, "MNIST", config.source, use, DIGITS) for use in TRAIN_TEST if use != "all")
    train, test = (replace(pool, dtype=dtype) for pool in parts_of)
    path, key = locate(root, INDICES, config.source), KEYS[config.environment]
    clients = 2 if config.environment == "two" else 5
    lists = read_npz(path, [f"{key}__{k}" for k in range(clients)], equal=False)
    parts = [np.sort(v.astype(np.int64)) for v in lists.values()]
    if max(part.max() for part in parts) >= len(train.labels):
        raise DataError(f"{path}: has indices beyond MNIST's training set; put the right files there")
    notes = (f"environment {config.environment} of the DUW paper", *partitions.describe(parts, train.labels))
    return _federate(config, seed, parts, train.convert, test.convert, test.labels, DIGITS, (*notes, train.note))


def _dogs(config: StanfordDogsConfig, seed: int, root: Path, dtype: torch.dtype) -> FederatedData:
    path, table = locate(root, FEATURES, config.source), locate(root, TABLE, config.source)
    arrays = read_npz(path, ("feat_u8", "y", "scale", "classes"), equal=False)
    features, labels = arrays["feat_u8"], check_labels(path, arrays["y"], 120).astype(np.int64)
    rows = np.arange(len(labels))
    known = rows < len(rows) * 4 // 5  # classes take turns, so that any such cut is balanced
    try:
        wanted = json.loads(read_bytes(table))["Size of samples for labels in clients"]
        counts = np.zeros((len(wanted), 120), dtype=np.int64)
        for client, pairs in enumerate(wanted):
            for label, count in pairs:
                counts[client, label] = count
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise DataError(f"{table}: not a table of samples per client and class ({e}); put the right file there") from e
    parts = _deal_in_shape(counts, labels, rows[known])

    axes = _principal_axes(features[known], config.components) if config.components else None

    def convert(index: Indices) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(features[index]).to(dtype) * float(arrays["scale"][0])
        return x if axes is None else x @ axes.to(dtype), torch.from_numpy(labels[index])

    test = rows[~known]

    def convert_test(index: Indices) -> tuple[Tensor, Tensor]:
        return convert(test[index])

    notes: tuple[str, ...] = ("120 breeds distributed like the DUW paper's five clients",)
    notes += (f"features: {config.components} principal axes of the training rows",) if config.components else ()
    notes += partitions.describe(parts, labels)
    names = tuple(str(c, "utf-8") if isinstance(c, bytes) else str(c) for c in arrays["classes"].tolist())
    return _federate(config, seed, parts, convert, convert_test, labels[test], names, notes)


def _principal_axes(features: NDArray[Any], count: int) -> Tensor:
    """Orthonormal axes [features, count] of the training rows' second moments, largest first.

    Features are not centred, so that a linear layer trains on the projections as it would on the features.
    """
    x = torch.from_numpy(features).double()
    axes = torch.linalg.eigh(x.T @ x)[1].flip(1)[:, :count]
    return axes * axes.sum(0).sign()  # the sign of an axis is arbitrary


def _deal_in_shape(counts: NDArray[np.int64], labels: NDArray[np.int64], rows: Indices) -> list[Indices]:
    """Distribute the rows of each class in the proportions of a table [clients, classes]."""
    dealt: list[list[Indices]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        own = rows[labels[rows] == label]
        ends = np.rint(counts[:, label].cumsum() / max(counts[:, label].sum(), 1) * len(own)).astype(int)
        for client, part in enumerate(np.split(own, ends)[:-1]):
            dealt[client].append(part)
    return [np.sort(np.concatenate(part)) for part in dealt]


def _federate(
    config: DuwMnistConfig | StanfordDogsConfig,
    seed: int,
    parts: list[Indices],
    convert: Convert,
    convert_test: Convert,
    test_labels: NDArray[Any],
    classes: tuple[str, ...],
    notes: tuple[str, ...],
) -> FederatedData:
    """Draw validation samples from each client's own, and give each an equal part of the common test set."""
    names = client_names(len(parts))
    orders = [stream(seed, name, "split").permutation(len(part)) for name, part in zip(names, parts, strict=True)]
    held = [int(len(part) * config.val) for part in parts]
    ends = [n + config.max_train if config.max_train else len(part) for n, part in zip(held, parts, strict=True)]
    everything = np.array_split(stream(seed, "test").permutation(len(test_labels)), len(parts))
    whole = [np.sort(part) for part in everything]
    return FederatedData(
        name=config.source,
        task="classification",
        clients=names,
        train=gather(parts, [np.sort(o[n:m]) for o, n, m in zip(orders, held, ends, strict=True)], convert),
        val=gather(parts, [np.sort(o[:n]) for o, n in zip(orders, held, strict=True)], convert),
        test=gather(whole, [np.arange(len(part)) for part in whole], convert_test),
        outputs=len(classes),
        classes=classes,
        notes=(*notes, f"val {config.val:g} of each client; each client has a part of one class-balanced test set"),
    )
