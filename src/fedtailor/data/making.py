"""A federation's data from what a program has for each client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.data import Chosen, FederatedData, Rows
from fedtailor.core.task import TargetKind
from fedtailor.core.trees import Tree, tree_map
from fedtailor.data.configs import SplitConfig
from fedtailor.data.objects import MASK, Targets, is_frame, pair
from fedtailor.data.splits import client_names, split, starts
from fedtailor.data.stored import Several
from fedtailor.errors import DataError, nearest

SPLITS = ("train", "val", "test")


def federated(
    clients: Mapping[str, Any] | Sequence[Any],
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
    collate: Callable[[Any], Any] | None = None,
) -> FederatedData:
    """The data of clients by name; those of a list are called client-00, client-01, ...

    A client is `(x, y)`, or `{"train": (x, y), "val": ..., "test": ...}` if it is split already. x is an array or
    tensor, named arrays, a list of sequences of unequal length (padded with 0, with an attention_mask beside them),
    or a `MappedArray`. y may be names of classes. In place of `(x, y)` a table of pandas or polars, or a Hugging Face
    Dataset, whose column `target` is y, will do, or a torch Dataset of pairs or of dicts; with `lazy` a torch Dataset
    is read batch by batch and never kept. `collate` makes a batch of the inputs of a Dataset, torch's by default.
    """
    if not isinstance(clients, Mapping):
        clients = dict(zip(client_names(len(clients)), clients, strict=True))
    if not clients:
        raise DataError(f"{name}: has no clients")
    samples = {str(client): _splits(of, f'{name}: client "{client}"') for client, of in clients.items()}
    if len(samples) < len(clients):
        raise DataError(f"{name}: two clients have the same name as text; each needs a name of its own")
    features = _features([part for of in samples.values() for part in of.values()], target)
    pairs = {
        client: {
            s: pair(v, f'{name}: client "{client}"' + (f", {s}" if s else ""), target, features, lazy, collate)
            for s, v in of.items()
        }
        for client, of in samples.items()
    }
    named = {str(v) for of in pairs.values() for _, y in of.values() if isinstance(y, np.ndarray) for v in y}
    if named and (numbers := [c for c, of in pairs.items() for _, y in of.values() if isinstance(y, Tensor)]):
        raise DataError(f'{name}: client "{numbers[0]}" has numbers as labels and others have names; use one of them')
    classes = tuple(classes) or tuple(sorted(named))
    if unknown := sorted(named - set(classes)):
        raise DataError(f'{name}: the label "{unknown[0]}" is not in classes; {nearest(unknown[0], classes)}')
    cut = SplitConfig(test=test, val=val)
    parts: dict[str, list[tuple[Tree, Tensor]]] = {s: [] for s in SPLITS}
    for client, of in pairs.items():
        ready = {s: (x, _numbered(y, classes, task)) for s, (x, y) in of.items()}
        if "" in ready:
            x, y = ready[""]
            labels = y.numpy() if y.dtype == torch.int64 and y.dim() == 1 else None
            cuts = split(len(y), labels, cut, seed=seed, client=client)
            ready = {s: _at(x, y, getattr(cuts, s)) for s in SPLITS}
        for s in SPLITS:
            parts[s].append(ready.get(s) or _at(*ready["train"], np.arange(0)))
    parts = _equally_long(parts)
    rows = {s: Rows(*_joined(each, name), starts([len(y) for _, y in each])) for s, each in parts.items()}
    if not len(rows["train"].y):
        raise DataError(f"{name}: no client has a training sample")
    kind = _kind(task, rows["train"].y, name)
    return FederatedData(
        name, kind, tuple(samples), rows["train"], rows["val"], rows["test"], outputs or _outputs(kind, rows, classes),
        classes, features,
    )  # fmt: skip


def _splits(samples: Any, where: str) -> Mapping[str, Any]:
    """Of a client: its splits by name, or "" for samples that are not split yet."""
    if not (isinstance(samples, Mapping) and set(samples) <= set(SPLITS)):
        return {"": samples}
    if "train" not in samples:
        raise DataError(f"{where}: has no training samples")
    return samples


def _features(parts: list[Any], target: str) -> tuple[str, ...]:
    """The columns of the first table, without the target."""
    table = next((v for v in parts if is_frame(v)), None)
    return () if table is None else tuple(str(k) for k in table.columns if str(k) != target)


def _numbered(y: Targets, classes: Sequence[str], task: str) -> Tensor:
    """Targets as the task wants them: names of classes as numbers, numbers to predict as columns."""
    if isinstance(y, np.ndarray):
        number = {label: i for i, label in enumerate(classes)}
        return torch.tensor([number[str(v)] for v in y], dtype=torch.int64)
    if task in ("regression", "quantile", "multilabel", "survival"):
        y = y if y.is_floating_point() else y.double()
        y = y[:, None] if y.dim() == 1 and task in ("regression", "quantile") else y
    if task == "count":
        return (y[:, None] if y.dim() == 1 else y).to(torch.int64)
    return y.float() if y.is_floating_point() and y.dtype != torch.float64 else y


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
        length = x[MASK].shape[1]
        ends = {k: (0, 0) * (v.dim() - 2) + (0, longest - length) for k, v in x.items() if v.shape[1:2] == (length,)}
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
        raise DataError(
            f"{name}: y is {y.dtype} [rows]; labels must be whole numbers (int64); "
            'to predict numbers, say task="regression"'
        )
    return "regression"


def _outputs(kind: str, rows: Mapping[str, Rows], classes: Sequence[str]) -> int:
    """Classes, or columns of the target."""
    if classes:
        return len(classes)
    if kind in ("classification", "tokens"):
        return 1 + max(int(r.y.max()) for r in rows.values() if len(r.y))
    return 1 if kind == "survival" or rows["train"].y.dim() < 2 else rows["train"].y.shape[1]
