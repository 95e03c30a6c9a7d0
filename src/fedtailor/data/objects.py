"""Samples and targets of one client, from what a program has: arrays, frames, sequences, Datasets, mapped files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedtailor.core.data import Chosen, count
from fedtailor.core.trees import Tree
from fedtailor.data.stored import DatasetSamples, MappedArray
from fedtailor.errors import DataError, nearest

Targets = Tensor | NDArray[np.str_]  # names of classes become numbers when those of all clients are known
MASK = "attention_mask"
NUMBERS = "biuf"  # kinds of numpy's types
GIVE = "give (x, y), a table, a Dataset, or the splits train, val and test"


def is_frame(value: Any) -> bool:
    """Whether it is a table of pandas or polars."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def pair(
    samples: Any, where: str, target: str, features: Sequence[str], lazy: bool, collate: Callable[[Any], Any] | None
) -> tuple[Tree, Targets]:
    """Samples and targets of a client; of a table, `features` in this order."""
    x: Tree
    if isinstance(samples, tuple) and len(samples) == 2:
        x, y = inputs(samples[0], where), _targets(samples[1], f"{where}, y")
    elif is_frame(samples):
        x, y = _table(samples, where, target, features)
    elif hasattr(samples, "with_format") and hasattr(samples, "column_names"):  # a Hugging Face Dataset
        columns = {k: samples[k] for k in samples.column_names}
        x = _named({k: v for k, v in columns.items() if k != target}, where)
        y = _targets(_column(columns, target, where), f"{where}, {target}")
    elif _is_dataset(samples):
        x, y = _dataset(samples, where, target, lazy, collate)
    else:
        raise DataError(f"{where}: {GIVE}; it is a {type(samples).__name__}")
    if count(x) != len(y):
        raise DataError(f"{where}: {count(x)} samples and {len(y)} targets")
    return x, y


def inputs(samples: Any, where: str) -> Tree:
    """Tensors; sequences of unequal length side by side, with a mask of what is not padding."""
    if isinstance(samples, MappedArray | DatasetSamples | Chosen):
        return samples
    if isinstance(samples, Mapping):
        return {str(k): _numbers(v, f"{where}, {k}") for k, v in samples.items()}
    if (
        isinstance(samples, list)
        and samples
        and not np.isscalar(samples[0])
        and len({np.shape(v) for v in samples}) > 1
    ):
        each = [_numbers(v, where) for v in samples]
        if len({v.shape[1:] for v in each}) > 1:
            raise DataError(f"{where}: sequences may differ in their first dimension only")
        mask = pad_sequence([torch.ones(len(v), dtype=torch.int64) for v in each], batch_first=True)
        return {"input_ids": pad_sequence(each, batch_first=True), MASK: mask}
    return _numbers(samples, where)


def _named(columns: Mapping[str, Any], where: str) -> Tree:
    """Parts by name; if some are sequences of unequal length, with a mask of the first of them."""
    x = {
        k: inputs(v if isinstance(v, list | np.ndarray | Tensor) else list(v), f"{where}, {k}")
        for k, v in columns.items()
    }
    padded = [v for v in x.values() if isinstance(v, dict)]
    x = {k: v["input_ids"] if isinstance(v, dict) else v for k, v in x.items()}
    return {MASK: padded[0][MASK]} | x if padded else x


def _table(frame: Any, where: str, target: str, features: Sequence[str]) -> tuple[Tensor, Targets]:
    columns = {str(k): frame[k].to_numpy() for k in frame.columns}
    y = _targets(_column(columns, target, where), f'{where}, column "{target}"')
    if other := set(features) ^ (columns.keys() - {target}):
        raise DataError(f'{where}: all tables need the same columns; "{min(other)}" is not in all of them')
    for name in features:
        if columns[name].dtype.kind not in NUMBERS:
            raise DataError(
                f'{where}: column "{name}" is not of numbers; encode or drop it, or use ft.fit, which prepares tables'
            )
    return torch.from_numpy(np.stack([columns[k].astype(np.float64) for k in features], axis=1)), y


def _column(columns: Mapping[str, Any], target: str, where: str) -> Any:
    if target not in columns:
        raise DataError(f'{where}: no column "{target}"; {nearest(target, columns)}. target= names it')
    return columns[target]


def _is_dataset(value: Any) -> bool:
    return (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, Mapping | np.ndarray | Tensor | str)
    )


def _dataset(
    dataset: Any, where: str, target: str, lazy: bool, collate: Callable[[Any], Any] | None
) -> tuple[Tree, Targets]:
    """Items are pairs, or dicts of which one entry is the target."""
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        return torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
    pick: Callable[[Any], Any]
    if isinstance(items[0], Mapping):
        _column(items[0], target, where)
        pick, y = (lambda item: {k: v for k, v in item.items() if k != target}), [item[target] for item in items]
    elif isinstance(items[0], tuple | list) and len(items[0]) == 2:
        pick, y = (lambda item: item[0]), [item[1] for item in items]
    else:
        raise DataError(f"{where}: an item of a Dataset must be a pair (x, y), or a dict with the target")
    targets = torch.stack(y) if isinstance(y[0], Tensor) else _targets(y, f"{where}, y")
    if lazy or collate is not None:
        samples = DatasetSamples(dataset, range(len(dataset)), pick, collate or torch.utils.data.default_collate)
        return (samples if lazy else samples.read(torch.arange(len(items)))), targets
    picked = [pick(item) for item in items]
    if isinstance(picked[0], Mapping):
        return _named({str(k): [np.asarray(one[k]) for one in picked] for k in picked[0]}, where), targets
    return inputs([np.asarray(one) for one in picked], where), targets


def _targets(values: Any, where: str) -> Targets:
    """Numbers, whole ones as int64; or names of classes."""
    if not isinstance(values, Tensor):
        values = np.asarray(values)
        if values.dtype.kind in "OUS" and values.ndim == 1 and all(isinstance(v, str) for v in values):
            return values.astype(np.str_)
    y = _numbers(values, where)
    return y if y.is_floating_point() else y.long()


def _numbers(values: Any, where: str) -> Tensor:
    if isinstance(values, Tensor):
        v = values
    else:
        try:
            array = np.asarray(values)
        except ValueError:
            raise DataError(f"{where}: must be numbers of one shape") from None
        if array.dtype.kind not in NUMBERS:
            raise DataError(f"{where}: must be numbers, and is of {array.dtype}")
        v = torch.from_numpy(np.require(array, requirements=["C", "W"]))  # torch wants memory that it may write to
    return v.long() if v.dtype in (torch.int32, torch.int16, torch.int8) else v
