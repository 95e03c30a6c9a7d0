"""A federation's data from what a program has: arrays, tensors, dicts, sequences, Datasets, mapped files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedtailor.core.rows import Chosen, Rows, count
from fedtailor.core.samples import FederatedData
from fedtailor.core.task import TargetKind
from fedtailor.core.trees import Tree, tree_map
from fedtailor.data.configs import SplitConfig
from fedtailor.data.splits import split, starts
from fedtailor.data.stored import DatasetSamples, MappedArray, Several
from fedtailor.errors import DataError

Samples = Any  # (x, y), a torch Dataset of (x, y), or a Hugging Face Dataset
SPLITS = ("train", "val", "test")
MASK = "attention_mask"


def federated(
    clients: Mapping[str, Any],
    *,
    task: str = "auto",
    name: str = "own",
    outputs: int | None = None,
    classes: Sequence[str] = (),
    target: str = "label",
    test: float = 0.25,
    val: float = 0.1,
    seed: int = 0,
    lazy: bool = False,
) -> FederatedData:
    """The data of clients by name.

    A client is `(x, y)`, or `{"train": (x, y), "val": ..., "test": ...}` if it is split already. x is an array or
    tensor, named arrays, a list of sequences of unequal length (padded with 0, with an attention_mask beside them),
    or a `MappedArray`. In place of `(x, y)` a torch Dataset of such pairs, or a Hugging Face Dataset whose column
    `target` is y, will do; with `lazy` a torch Dataset is read batch by batch and never kept.
    """
    if not clients:
        raise DataError(f"{name}: has no clients")
    cut = SplitConfig(test=test, val=val)
    parts: dict[str, list[tuple[Tree, Tensor]]] = {s: [] for s in SPLITS}
    for client, given in clients.items():
        where = f'{name}: client "{client}"'
        ready = given if isinstance(given, Mapping) and set(given) <= set(SPLITS) else None
        if ready is not None and "train" not in ready:
            raise DataError(f"{where}: has no training samples")
        if ready is None:
            x, y = _pair(given, where, target, lazy)
            labels = y.numpy() if y.dtype == torch.int64 and y.dim() == 1 else None
            cuts = split(len(y), labels, cut, seed=seed, client=client)
            for s in SPLITS:
                parts[s].append(_at(x, y, getattr(cuts, s)))
        else:
            pairs = {s: _pair(ready[s], f"{where}, {s}", target, lazy) for s in ready}
            for s in SPLITS:
                parts[s].append(pairs.get(s) or _at(*pairs["train"], np.arange(0)))
    parts = _equally_long(parts)
    rows = {s: Rows(*_joined(each, name), starts([len(y) for _, y in each])) for s, each in parts.items()}
    y = rows["train"].y
    kind = _kind(task, y, name)
    return FederatedData(
        name, kind, tuple(clients), rows["train"], rows["val"], rows["test"], outputs or _outputs(kind, rows, classes),
        tuple(classes),
    )  # fmt: skip


def _pair(given: Samples, where: str, target: str, lazy: bool) -> tuple[Tree, Tensor]:
    if isinstance(given, tuple) and len(given) == 2:
        x, y = _inputs(given[0], where), _numbers(given[1], f"{where}, y")
    elif hasattr(given, "with_format") and hasattr(given, "column_names"):  # a Hugging Face Dataset
        if target not in given.column_names:
            raise DataError(f'{where}: no column "{target}"; it has {", ".join(given.column_names)}')
        held = {k: given[k] for k in given.column_names if k != target}
        y = _numbers(given[target], f"{where}, {target}")
        x = {
            k: _inputs(v if isinstance(v, list | np.ndarray | Tensor) else list(v), f"{where}, {k}")
            for k, v in held.items()
        }
        padded = [v for v in x.values() if isinstance(v, dict)]
        x = {k: v["input_ids"] if isinstance(v, dict) else v for k, v in x.items()}
        x = {MASK: padded[0][MASK]} | x if padded else x
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, Mapping):
        targets = [torch.as_tensor(given[i][1]) for i in range(len(given))]
        y = torch.stack(targets) if targets else torch.zeros(0, dtype=torch.int64)
        x = DatasetSamples(given, range(len(given)), _first)
        x = x if lazy else x.read(torch.arange(len(x)))
    else:
        raise DataError(f"{where}: give (x, y), a Dataset of such pairs, or the splits train, val and test")
    if count(x) != len(y):
        raise DataError(f"{where}: {count(x)} samples and {len(y)} targets")
    return x, y.float() if y.is_floating_point() and y.dtype != torch.float64 else y


def _first(item: Any) -> Any:
    return item[0]


def _inputs(given: Any, where: str) -> Tree:
    """Tensors; sequences of unequal length side by side, with a mask of what is not padding."""
    if isinstance(given, MappedArray | DatasetSamples | Chosen):
        return given
    if isinstance(given, Mapping):
        return {str(k): _numbers(v, f"{where}, {k}") for k, v in given.items()}
    if isinstance(given, list) and given and not np.isscalar(given[0]) and len({np.shape(v) for v in given}) > 1:
        each = [_numbers(v, where) for v in given]
        if len({v.shape[1:] for v in each}) > 1:
            raise DataError(f"{where}: sequences may differ in their first dimension only")
        mask = pad_sequence([torch.ones(len(v), dtype=torch.int64) for v in each], batch_first=True)
        return {"input_ids": pad_sequence(each, batch_first=True), MASK: mask}
    return _numbers(given, where)


def _numbers(given: Any, where: str) -> Tensor:
    try:
        v = given if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: not numbers: {error}") from None
    return v.long() if v.dtype in (torch.int32, torch.int16, torch.int8) else v


def _at(x: Tree, y: Tensor, at: Any) -> tuple[Tree, Tensor]:
    index = torch.as_tensor(at)
    if isinstance(x, Tensor | dict):
        return tree_map(lambda v: v[index], x), y[index]
    return Chosen(x, index), y[index]


def _joined(parts: list[tuple[Tree, Tensor]], name: str) -> tuple[Tree, Tensor]:
    """The samples of all clients one after another; sequences are padded to the longest of all."""
    first = parts[0][0]
    if not isinstance(first, Tensor | dict):
        return Several([x for x, _ in parts]), torch.cat([y for _, y in parts])
    if isinstance(first, dict):
        for x, _ in parts:
            if x.keys() != first.keys():
                raise DataError(f"{name}: clients have samples of {sorted(first)} and of {sorted(x)}")
        joined: Tree = {k: _cat([x[k] for x, _ in parts], f"{name}, {k}") for k in first}
    else:
        joined = _cat([x for x, _ in parts], name)
    return joined, torch.cat([y for _, y in parts])


def _cat(parts: list[Tensor], where: str) -> Tensor:
    if len(shapes := {v.shape[1:] for v in parts}) > 1:
        raise DataError(f"{where}: clients have samples of shapes {', '.join(str(list(s)) for s in shapes)}")
    return torch.cat(parts)


def _equally_long(parts: dict[str, list[tuple[Tree, Tensor]]]) -> dict[str, list[tuple[Tree, Tensor]]]:
    """Sequences that have a mask, padded to the longest of all clients and splits."""
    every = [x for each in parts.values() for x, _ in each]
    if not all(isinstance(x, dict) and MASK in x for x in every):
        return parts
    longest = max(x[MASK].shape[1] for x in every)

    def padded(x: dict[str, Tensor]) -> dict[str, Tensor]:
        here = x[MASK].shape[1]
        ends = {k: (0, 0) * (v.dim() - 2) + (0, longest - here) for k, v in x.items() if v.shape[1:2] == (here,)}
        return {k: torch.nn.functional.pad(v, ends[k]) if k in ends else v for k, v in x.items()}

    return {s: [(padded(x), y) for x, y in each] for s, each in parts.items()}


def _kind(task: str, y: Tensor, name: str) -> TargetKind:
    if task != "auto":
        kind = "regression" if task == "quantile" else "own" if ":" in task else task
        if kind not in get_args(TargetKind):
            raise DataError(f'{name}: no task "{task}"; {", ".join(get_args(TargetKind))}')
        return kind  # type: ignore[return-value]
    if y.dtype == torch.int64 and y.dim() in (1, 2):
        return "classification" if y.dim() == 1 else "tokens"
    if y.is_floating_point() and y.dim() == 1:
        raise DataError(f"{name}: y is {y.dtype} [rows]; labels must be whole numbers, numbers to predict [rows, 1]")
    return "regression"


def _outputs(kind: str, rows: Mapping[str, Rows], classes: Sequence[str]) -> int:
    """Classes, or columns of the target."""
    if classes:
        return len(classes)
    if kind in ("classification", "tokens"):
        return 1 + max(int(r.y.max()) for r in rows.values() if len(r.y))
    return 1 if kind == "survival" or rows["train"].y.dim() < 2 else rows["train"].y.shape[1]
