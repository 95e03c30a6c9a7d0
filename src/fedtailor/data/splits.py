"""Split each client's samples into train, val and test, and concatenate the parts of all clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import Rows
from fedtailor.core.random import stream
from fedtailor.data.configs import SplitConfig

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Disjoint positions of one client's samples, ascending."""

    train: Indices
    val: Indices
    test: Indices


def split(samples: int, labels: NDArray[np.int64] | None, config: SplitConfig, *, seed: int, client: str) -> Split:
    """Split one client's samples, stratified by label if labels are given, independently of other clients."""
    indices = np.arange(samples)
    if config.max_samples is not None and config.max_samples < samples:
        indices = np.sort(_shuffle(indices, labels, stream(seed, client, "subsample"))[: config.max_samples])
    order = _shuffle(indices, labels, stream(seed, client, "split"))
    n_test, n_val = _counts(len(order), config.test, config.val)
    test, val, train = np.split(order, [n_test, n_test + n_val])
    return Split(np.sort(train[: config.max_train]), np.sort(val), np.sort(test))


def split_in_time(samples: int, config: SplitConfig) -> Split:
    """Split samples in temporal order: training before validation before test."""
    n_test, n_val = _counts(samples, config.test, config.val)
    train, val, test = np.split(np.arange(samples), [samples - n_test - n_val, samples - n_test])
    return Split(train[: config.max_train], val, test)


def split_note(config: SplitConfig) -> str:
    most = "" if config.max_samples is None else f" of at most {config.max_samples} samples"
    train = "" if config.max_train is None else f", train on at most {config.max_train} of the rest"
    return f"split per client{most}: test {config.test:g}, val {config.val:g}{train}"


def gather(
    clients: Sequence[Indices], positions: Sequence[Indices], convert: Callable[[Indices], tuple[Tensor, Tensor]]
) -> Rows:
    """Rows of the pooled samples `clients[i][positions[i]]`; `convert` turns pooled indices into features, targets."""
    pooled = np.concatenate([index[at] for index, at in zip(clients, positions, strict=True)])
    x, y = convert(pooled)
    return Rows(x, y, starts([len(at) for at in positions]))


def starts(sizes: Sequence[int]) -> Tensor:
    """First row of each client, and the number of rows."""
    return torch.tensor([0, *np.cumsum(sizes).tolist()], dtype=torch.int64)


def client_names(count: int) -> tuple[str, ...]:
    """client-00, client-01, ..."""
    width = max(2, len(str(count - 1)))
    return tuple(f"client-{i:0{width}d}" for i in range(count))


def _shuffle(indices: Indices, labels: NDArray[np.int64] | None, rng: np.random.Generator) -> Indices:
    """A random order in which every interval has about the class proportions of the whole."""
    order = rng.permutation(indices)
    if labels is None:
        return order
    place = np.empty(len(order))
    for label in np.unique(labels[order]):
        members = np.flatnonzero(labels[order] == label)
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return order[np.argsort(place, kind="stable")]


def _counts(samples: int, test: float, val: float) -> tuple[int, int]:
    """Sizes of test and val, each at least 1 if requested and there are three samples; train has at least 1."""
    if samples < 3:
        return int(samples == 2 and test > 0), 0
    n_test = max(1, int(samples * test + 0.5)) if test > 0 else 0
    n_val = max(1, int(samples * val + 0.5)) if val > 0 else 0
    while n_test + n_val >= samples:
        n_test, n_val = (n_test - 1, n_val) if n_test >= n_val else (n_test, n_val - 1)
    return n_test, n_val
