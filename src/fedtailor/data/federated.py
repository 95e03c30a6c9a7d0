"""A federation's data from arrays, tables, sequences, Datasets or mapped files of each client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedtailor.core.data import Chosen, FederatedData, Rows, count
from fedtailor.core.segmentation import VOID
from fedtailor.core.task import IGNORED, TargetKind
from fedtailor.core.trees import Tree, tree_map
from fedtailor.data.configs import SplitConfig
from fedtailor.data.image_masks import are_masks, encode_masks, pad_images
from fedtailor.data.mapped_arrays import DatasetSamples, JoinedSamples, MappedArray
from fedtailor.data.splits import client_names, split, starts
from fedtailor.errors import DataError, nearest

SPLITS = ("train", "val", "test")
Targets = Tensor | NDArray[np.str_]  # names of classes become numbers when those of all clients are known
MASK = "attention_mask"
NUMBERS = "biuf"  # kinds of numpy's types
GIVE = "give (x, y), a table, a Dataset, or the splits train, val and test"


class DatasetReading(NamedTuple):
    """How torch Datasets are read: batch by batch or at once, collated by what, by so many threads."""

    is_lazy: bool
    collate: Callable[[Any], Any] | None
    threads: int


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
    threads: int = 0,
) -> FederatedData:
    """The data of a federation from arrays, frames or Datasets.

    Args:
        clients: The data of each client by its name; those of a list are called client-00, client-01, ... A client is
            `(x, y)`, or `{"train": (x, y), "val": ..., "test": ...}` if it is split already. x is an array or tensor,
            named arrays, a list of sequences of unequal length (padded with 0, with an attention_mask), or a
            `MappedArray`; y may be names of classes. In place of `(x, y)`: a table of pandas or polars or a Hugging
            Face Dataset, whose column `target` is y, or a torch Dataset of pairs or dicts.
        task: The kind of target, such as "classification"; "auto" decides by y.
        name: What the data is called in messages and reports.
        outputs: Number of classes or target columns, if y does not show it.
        classes: Names of the classes, in the order of their numbers.
        target: The column of tables that is y.
        test: Share of a client's samples for testing.
        val: Share of the others for validation.
        seed: Of the split.
        lazy: Read torch Datasets batch by batch instead of keeping them in memory.
        collate: Makes a batch of the inputs of a Dataset; default: torch's.
        threads: So many read the items of a batch of a lazy Dataset at the same time, as a DataLoader's workers do.
            Items that draw random numbers are then not the same in every run.

    Returns:
        Data for `fedtailor.run`.

    Raises:
        DataError: Names the client whose data cannot be used.
    """
    if not isinstance(clients, Mapping):
        clients = dict(zip(client_names(len(clients)), clients, strict=True))
    if not clients:
        raise DataError(f"{name}: has no clients")
    samples = {str(client): _by_split(of, f'{name}: client "{client}"') for client, of in clients.items()}
    if len(samples) < len(clients):
        raise DataError(f"{name}: two clients have the same name as text; each needs a name of its own")
    notes = () if lazy else tuple(_random_datasets(samples))
    how = DatasetReading(lazy, collate, threads)
    features = _feature_names([part for of in samples.values() for part in of.values()], target)
    pairs = {
        client: {
            s: read_samples(v, f'{name}: client "{client}"' + (f", {s}" if s else ""), target, features, how)
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
    if task == "auto" and are_masks(pairs):
        task = "segmentation"
    if task == "segmentation":
        if lazy:
            _refuse_random_masks(samples, target, name)
        pairs = {client: dict(of) for client, of in encode_masks(pairs, name).items()}
    cut = SplitConfig(test=test, val=val)
    parts: dict[str, list[tuple[Tree, Tensor]]] = {s: [] for s in SPLITS}
    for client, of in pairs.items():
        ready = {s: (x, _encode_targets(y, classes, task)) for s, (x, y) in of.items()}
        if "" in ready:
            x, y = ready[""]
            labels = y.numpy() if y.dtype == torch.int64 and y.dim() == 1 else None
            cuts = split(len(y), labels, cut, seed=seed, client=client)
            ready = {s: _take_samples(x, y, getattr(cuts, s)) for s in SPLITS}
        for s in SPLITS:
            parts[s].append(ready.get(s) or _take_samples(*ready["train"], np.arange(0)))
    parts = {s: pad_images(each) for s, each in parts.items()} if task == "segmentation" else _pad_equally(parts)
    rows = {s: Rows(*_join_clients(each, name), starts([len(y) for _, y in each])) for s, each in parts.items()}
    if not len(rows["train"].y):
        raise DataError(f"{name}: no client has a training sample")
    kind = _resolve_task(task, rows["train"].y, name)
    return FederatedData(
        name=name,
        task=kind,
        clients=tuple(samples),
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        outputs=outputs or _count_outputs(kind, rows, classes),
        classes=classes,
        features=features,
        notes=notes,
    )


def _by_split(samples: Any, where: str) -> Mapping[str, Any]:
    """A client's samples by split, or under "" if they are not split yet."""
    if not (isinstance(samples, Mapping) and set(samples) <= set(SPLITS)):
        return {"": samples}
    if "train" not in samples:
        raise DataError(f"{where}: has no training samples")
    return samples


def _feature_names(parts: list[Any], target: str) -> tuple[str, ...]:
    """The columns of the first table but the target."""
    table = next((v for v in parts if is_frame(v)), None)
    return () if table is None else tuple(str(k) for k in table.columns if str(k) != target)


def _encode_targets(y: Targets, classes: Sequence[str], task: str) -> Tensor:
    """Targets in the form of the task: class names as numbers, numbers to predict as columns."""
    if isinstance(y, np.ndarray):
        number = {label: i for i, label in enumerate(classes)}
        return torch.tensor([number[str(v)] for v in y], dtype=torch.int64)
    if task in ("regression", "quantile", "multilabel", "survival"):
        y = y if y.is_floating_point() else y.double()
        y = y[:, None] if y.dim() == 1 and task in ("regression", "quantile") else y
    if task == "count":
        return (y[:, None] if y.dim() == 1 else y).to(torch.int64)
    return y.float() if y.is_floating_point() and y.dtype != torch.float64 else y


def _take_samples(x: Tree, y: Tensor, at: Any) -> tuple[Tree, Tensor]:
    index = torch.as_tensor(at)
    if isinstance(x, Tensor | dict):
        return tree_map(lambda v: v[index], x), y[index]
    return Chosen(x, index), y[index]


def _join_clients(parts: list[tuple[Tree, Tensor]], name: str) -> tuple[Tree, Tensor]:
    first = parts[0][0]
    if not isinstance(first, Tensor | dict):
        return JoinedSamples([x for x, _ in parts]), torch.cat([y for _, y in parts])
    if isinstance(first, dict):
        for x, _ in parts:
            if x.keys() != first.keys():
                raise DataError(f"{name}: clients have samples of {sorted(first)} and of {sorted(x)}")
        joined: Tree = {k: _concatenate([x[k] for x, _ in parts], f"{name}, {k}") for k in first}
    else:
        joined = _concatenate([x for x, _ in parts], name)
    return joined, torch.cat([y for _, y in parts])


def _concatenate(parts: list[Tensor], where: str) -> Tensor:
    if len(shapes := {v.shape[1:] for v in parts}) > 1:
        raise DataError(f"{where}: clients have samples of shapes {', '.join(str(list(s)) for s in shapes)}")
    return torch.cat(parts)


def _pad_equally(parts: dict[str, list[tuple[Tree, Tensor]]]) -> dict[str, list[tuple[Tree, Tensor]]]:
    """Pad sequences that have a mask to the longest of all clients and splits."""
    parts = _pad_tokens(parts)
    every = [x for each in parts.values() for x, _ in each]
    if not all(isinstance(x, dict) and MASK in x for x in every):
        return parts
    longest = max(x[MASK].shape[1] for x in every)

    def pad(x: dict[str, Tensor]) -> dict[str, Tensor]:
        length = x[MASK].shape[1]
        ends = {k: (0, 0) * (v.dim() - 2) + (0, longest - length) for k, v in x.items() if v.shape[1:2] == (length,)}
        return {k: torch.nn.functional.pad(v, ends[k]) if k in ends else v for k, v in x.items()}

    return {s: [(pad(x), y) for x, y in each] for s, each in parts.items()}


def _pad_tokens(parts: dict[str, list[tuple[Tree, Tensor]]]) -> dict[str, list[tuple[Tree, Tensor]]]:
    """Targets that are sequences of tokens, padded to the longest of all clients and splits."""
    every = [y for each in parts.values() for _, y in each]
    if not all(y.dtype == torch.int64 and y.dim() == 2 for y in every if len(y)):
        return parts
    longest = max((y.shape[1] for y in every if y.dim() == 2), default=0)

    def pad(y: Tensor) -> Tensor:
        if y.dim() < 2:
            return y
        return torch.nn.functional.pad(y, (0, longest - y.shape[1]), value=IGNORED)

    return {s: [(x, pad(y)) for x, y in each] for s, each in parts.items()}


def _random_datasets(samples: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A note on Datasets that give another sample each time: they are read only once."""
    for client, of in samples.items():
        for part in of.values():
            if _is_read(part) and len(part) and not _are_same(part[0], part[0]):
                return [
                    f'client "{client}": its Dataset gives another sample each time that it is read, as with random '
                    "augmentation; all were read once. With lazy=True they are read anew in every epoch"
                ]
    return []


def _refuse_random_masks(samples: Mapping[str, Mapping[str, Any]], target: str, name: str) -> None:
    """Targets are read once: a mask that moves with its image would not be that of the image that is read next."""
    for client, of in samples.items():
        for part in of.values():
            if not _is_read(part) or not len(part):
                continue
            key = target if isinstance(part[0], Mapping) else 1
            if not _are_same(part[0][key], part[0][key]):
                raise DataError(
                    f'{name}: client "{client}": its Dataset gives another mask each time that it is read, and '
                    "masks are read once; leave out what moves images and set local.augment, which moves both"
                )


def _is_read(samples: Any) -> bool:
    """Whether it is a Dataset that is read item by item."""
    is_other = isinstance(samples, tuple) or is_frame(samples) or hasattr(samples, "column_names")
    return not is_other and _is_dataset(samples)


def _are_same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return all(_are_same(v, b[k]) for k, v in a.items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_are_same, a, b))
    first, second = np.asarray(a), np.asarray(b)
    return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")


def _resolve_task(task: str, y: Tensor, name: str) -> TargetKind:
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
            'to predict numbers, set task="regression"'
        )
    return "regression"


def _count_outputs(kind: str, rows: Mapping[str, Rows], classes: Sequence[str]) -> int:
    """The number of classes, or of columns of the target."""
    if classes:
        return len(classes)
    if kind == "segmentation":
        return max(2, *(1 + int(torch.where(r.y == VOID, 0, r.y).max()) for r in rows.values() if len(r.y)))
    if kind in ("classification", "tokens"):
        return 1 + max(int(r.y.max()) for r in rows.values() if len(r.y))
    return 1 if kind == "survival" or rows["train"].y.dim() < 2 else rows["train"].y.shape[1]


def is_frame(value: Any) -> bool:
    """Whether it is a table of pandas or polars."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def read_samples(
    samples: Any, where: str, target: str, features: Sequence[str], how: DatasetReading
) -> tuple[Tree, Targets]:
    """Samples and targets of a client; a table's columns are in the order of `features`."""
    x: Tree
    if isinstance(samples, tuple) and len(samples) == 2:
        x, y = to_inputs(samples[0], where), _to_targets(samples[1], f"{where}, y")
    elif is_frame(samples):
        x, y = _read_frame(samples, where, target, features)
    elif hasattr(samples, "with_format") and hasattr(samples, "column_names"):  # a Hugging Face Dataset
        columns = {k: samples[k] for k in samples.column_names}
        x = _named_inputs({k: v for k, v in columns.items() if k != target}, where)
        y = _to_targets(_target_column(columns, target, where), f"{where}, {target}")
    elif _is_dataset(samples):
        x, y = _read_dataset(samples, where, target, how)
    else:
        raise DataError(f"{where}: {GIVE}; it is a {type(samples).__name__}")
    if count(x) != len(y):
        raise DataError(f"{where}: {count(x)} samples and {len(y)} targets")
    return x, y


def to_inputs(samples: Any, where: str) -> Tree:
    """Inputs as tensors; sequences of unequal length are padded and get an attention mask."""
    if isinstance(samples, MappedArray | DatasetSamples | Chosen):
        return samples
    if isinstance(samples, Mapping):
        return {str(k): _to_tensor(v, f"{where}, {k}") for k, v in samples.items()}
    if (
        isinstance(samples, list)
        and samples
        and not np.isscalar(samples[0])
        and len({np.shape(v) for v in samples}) > 1
    ):
        each = [_to_tensor(v, where) for v in samples]
        if len({v.shape[1:] for v in each}) > 1:
            raise DataError(f"{where}: sequences may differ in their first dimension only")
        mask = pad_sequence([torch.ones(len(v), dtype=torch.int64) for v in each], batch_first=True)
        return {"input_ids": pad_sequence(each, batch_first=True), MASK: mask}
    return _to_tensor(samples, where)


def _named_inputs(columns: Mapping[str, Any], where: str) -> Tree:
    """Named inputs; if some are sequences of unequal length, the attention mask is that of the first of them."""
    x = {
        k: to_inputs(v if isinstance(v, list | np.ndarray | Tensor) else list(v), f"{where}, {k}")
        for k, v in columns.items()
    }
    padded = [v for v in x.values() if isinstance(v, dict)]
    x = {k: v["input_ids"] if isinstance(v, dict) else v for k, v in x.items()}
    return {MASK: padded[0][MASK]} | x if padded else x


def _read_frame(frame: Any, where: str, target: str, features: Sequence[str]) -> tuple[Tensor, Targets]:
    columns = {str(k): frame[k].to_numpy() for k in frame.columns}
    y = _to_targets(_target_column(columns, target, where), f'{where}, column "{target}"')
    if other := set(features) ^ (columns.keys() - {target}):
        raise DataError(f'{where}: all tables need the same columns; "{min(other)}" is not in all of them')
    for name in features:
        if columns[name].dtype.kind not in NUMBERS:
            raise DataError(
                f'{where}: column "{name}" is not of numbers; encode or drop it, or use ft.fit, which prepares tables'
            )
    return torch.from_numpy(np.stack([columns[k].astype(np.float64) for k in features], axis=1)), y


def _target_column(columns: Mapping[str, Any], target: str, where: str) -> Any:
    if target not in columns:
        raise DataError(f'{where}: no column "{target}"; {nearest(target, columns)}. target= names it')
    return columns[target]


def _is_dataset(value: Any) -> bool:
    return (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, Mapping | np.ndarray | Tensor | str)
    )


def _read_dataset(dataset: Any, where: str, target: str, how: DatasetReading) -> tuple[Tree, Targets]:
    """Read a Dataset of pairs, or of dicts with the target as one entry."""
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        return torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
    pick: Callable[[Any], Any]
    if isinstance(items[0], Mapping):
        _target_column(items[0], target, where)
        pick, y = (lambda item: {k: v for k, v in item.items() if k != target}), [item[target] for item in items]
    elif isinstance(items[0], tuple | list) and len(items[0]) == 2:
        pick, y = (lambda item: item[0]), [item[1] for item in items]
    else:
        raise DataError(f"{where}: an item of a Dataset must be a pair (x, y), or a dict with the target")
    targets = _to_targets([v.numpy() for v in y] if isinstance(y[0], Tensor) else y, f"{where}, y")
    if how.is_lazy or how.collate is not None:
        collate = how.collate or torch.utils.data.default_collate
        samples = DatasetSamples(dataset, range(len(dataset)), pick, collate, threads=how.threads)
        return (samples if how.is_lazy else samples.read(torch.arange(len(items)))), targets
    picked = [pick(item) for item in items]
    if isinstance(picked[0], Mapping):
        return _named_inputs({str(k): [np.asarray(one[k]) for one in picked] for k in picked[0]}, where), targets
    return to_inputs([np.asarray(one) for one in picked], where), targets


def _to_targets(values: Any, where: str) -> Targets:
    """Targets as a tensor, integers as int64, or class names; sequences of tokens padded with what does not count."""
    if isinstance(values, list) and len(shapes := [np.shape(v) for v in values]) and len(set(shapes)) > 1:
        return _pad_targets([_to_tensor(v, f"{where}, sample {i + 1}") for i, v in enumerate(values)], where)
    if not isinstance(values, Tensor):
        values = np.asarray(values)
        if values.dtype.kind in "OUS" and values.ndim == 1 and all(isinstance(v, str) for v in values):
            return values.astype(np.str_)
    y = _to_tensor(values, where)
    return y if y.is_floating_point() else y.long()


def _pad_targets(each: list[Tensor], where: str) -> Tensor:
    if any(v.dim() != 1 or v.is_floating_point() for v in each):
        usual = Counter(v.shape for v in each).most_common(1)[0][0]
        i = next(i for i, v in enumerate(each) if v.shape != usual)
        raise DataError(
            f"{where}: the target of sample {i + 1} has shape {list(each[i].shape)}, that of most {list(usual)}; pad "
            "targets to one shape, as with -1 where there is nothing, and give a task of your own that leaves this out"
        )
    return pad_sequence([v.long() for v in each], batch_first=True, padding_value=IGNORED)


def _to_tensor(values: Any, where: str) -> Tensor:
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
