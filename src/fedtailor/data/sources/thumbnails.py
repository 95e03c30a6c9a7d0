"""Thumbnails in one .npz file: Mini-ImageNet, distributed by a partition; PACS, one client per domain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData
from fedtailor.data import partitions
from fedtailor.data.configs import MiniImageNetConfig, PacsConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import check_labels, read_npz
from fedtailor.data.pools import TRAIN_TEST, ImagePool, deal_pool, split_pool
from fedtailor.errors import DataError

MINI_IMAGENET, PACS = "mini_imagenet32_6k.npz", "pacs32.npz"
SPLITS = ("train", "test")  # as numbered in the file of Mini-ImageNet
DOMAINS = ("art", "cartoon", "photo", "sketch")  # as numbered in the file of PACS, and so are the classes
THINGS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def load(
    config: MiniImageNetConfig | PacsConfig, *, seed: int, root: Path | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Read, distribute and split the thumbnails of a configuration."""
    folder = data_root(root)
    if isinstance(config, MiniImageNetConfig):
        return deal_pool(config.source, replace(_mini_imagenet(folder, config.use), dtype=dtype), config, seed)
    return _pacs(folder, config, seed, dtype)


def _mini_imagenet(root: Path, use: str) -> ImagePool:
    path = locate(root, MINI_IMAGENET, "mini-imagenet")
    arrays = _arrays(path, "split")
    split = check_labels(path, arrays["split"], len(SPLITS))
    is_used = np.isin(split, [SPLITS.index(part) for part in TRAIN_TEST[use]])
    classes = tuple(str(k) for k in range(100))
    return _pool(path, arrays["x"][is_used], arrays["y"][is_used], classes)


def _pacs(root: Path, config: PacsConfig, seed: int, dtype: torch.dtype) -> FederatedData:
    path = locate(root, PACS, config.source)
    arrays = _arrays(path, "domain")
    domain = check_labels(path, arrays["domain"], len(DOMAINS))
    pool = replace(_pool(path, arrays["x"], arrays["y"], THINGS), dtype=dtype)
    parts = [np.flatnonzero(domain == d) for d in range(len(DOMAINS))]
    for name, part in zip(DOMAINS, parts, strict=True):
        if not len(part):
            raise DataError(f"{path}: has no images of the domain {name}; put the whole file there")
    notes = ("partition: by domain", *partitions.describe(parts, pool.labels))
    return split_pool(config.source, pool, parts, DOMAINS, config, seed, notes)


def _arrays(path: Path, group: str) -> dict[str, NDArray[Any]]:
    """Images "x", labels "y" and the array `group`; wrong types are errors."""
    arrays = read_npz(path, ("x", "y", group))
    x = arrays["x"]
    if x.ndim != 4 or x.shape[-1] != 3 or x.dtype != np.uint8:
        raise DataError(
            f'{path}: "x" is {x.dtype} of shape {list(x.shape)}, not uint8 of [images, height, width, 3]; '
            "put the right file there"
        )
    if any(arrays[k].ndim != 1 or arrays[k].dtype.kind not in "iu" for k in ("y", group)):
        raise DataError(f'{path}: "y" and "{group}" must be rows of whole numbers; put the right file there')
    return arrays


def _pool(path: Path, x: NDArray[Any], y: NDArray[Any], classes: tuple[str, ...]) -> ImagePool:
    labels = check_labels(path, y, len(classes)).astype(np.int64)
    return ImagePool(np.ascontiguousarray(x.transpose(0, 3, 1, 2)), labels, classes)
