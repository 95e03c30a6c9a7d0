"""Folders that PFLlib's generate scripts write: train/0.npz, test/0.npz and so on, one pair per client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.data.configs import PFLlibConfig, SplitConfig
from fedtailor.data.files import expand_home
from fedtailor.data.pickled_arrays import read_dict
from fedtailor.data.splits import client_names, split, starts
from fedtailor.errors import DataError

Samples = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def load(config: PFLlibConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """PFLlib's own test data; validation data is taken from its training data."""
    folder = expand_home(config.path)
    files = sorted((folder / "train").glob("*.npz"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise DataError(f"{folder}: no train/*.npz; give the folder that PFLlib's generate script made, such as MNIST")
    names = client_names(len(files))
    parts: dict[str, list[Samples]] = {"train": [], "val": [], "test": []}
    cut = SplitConfig(test=0.0, val=config.val, max_train=config.max_train)
    for name, file in zip(names, files, strict=True):
        x, y = _samples(file)
        at = split(len(y), y if y.dtype.kind in "iu" else None, cut, seed=seed, client=name)
        parts["train"].append((x[at.train], y[at.train]))
        parts["val"].append((x[at.val], y[at.val]))
        parts["test"].append(_samples(folder / "test" / file.name))
    train, val, test = map(_rows, parts.values())
    classes = 1 + max(int(each.y.max()) for each in (train, val, test) if len(each.y))
    note = f"PFLlib's split: its test data, {config.val:g} of its training data for validation"
    return FederatedData(folder.name, "classification", names, train, val, test, classes, notes=(note,))


def _samples(file: Path) -> Samples:
    content = read_dict(file)
    x, y = content.get("x"), content.get("y")
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise DataError(f'{file}: "x" and "y" must be arrays; PFLlib\'s text data, as lists, is not read')
    if len(x) != len(y) or y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f'{file}: "y" must be one class per sample of "x"')
    return x, y.astype(np.int64)


def _rows(parts: list[Samples]) -> Rows:
    x: Tensor = torch.from_numpy(np.concatenate([x for x, _ in parts]).astype(np.float32))
    return Rows(x, torch.from_numpy(np.concatenate([y for _, y in parts])), starts([len(y) for _, y in parts]))
