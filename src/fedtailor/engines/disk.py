"""Tensors too large for memory: in files that are mapped, with a budget for what stays in memory of them."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fedtailor.core.trees import Tree, tree_map
from fedtailor.errors import RunError

SLICE = 64 * 2**20  # bytes that are copied at once


class Disk:
    """Makes tensors whose values lie in files of a folder. What was read and written is counted, and when that is more
    than the budget, all of it leaves memory; the operating system's cache still has what is used often.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._touched = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in a file without a name: it is gone with the tensor or the process, however that ends."""
        size = prod(shape) * dtype.itemsize
        if not size:
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            try:
                _allocate(file.fileno(), size)
            except OSError as error:
                raise RunError(
                    f"{self.folder}: no room for {size / 2**30:.1f} GB of private states: {error.strerror}"
                ) from None
            mapped = mmap.mmap(file.fileno(), size)
        self._maps.add(mapped)
        return torch.frombuffer(mapped, dtype=dtype).reshape(tuple(shape))

    def touch(self, size: int) -> None:
        """So many bytes were read or written."""
        self._touched += size
        if self._touched > self.budget:
            self._touched = 0
            for mapped in self._maps:
                if hasattr(mmap, "MADV_DONTNEED"):  # not everywhere
                    mapped.madvise(mmap.MADV_DONTNEED)  # of a shared mapping nothing is lost, it is only no longer here

    def fill(self, to: Tensor, values: Tensor) -> None:
        step = max(1, SLICE // max(1, values[:1].nbytes))
        for i in range(0, len(values), step):
            to[i : i + step] = values[i : i + step]
            self.touch(2 * values[i : i + step].nbytes)

    def copy(self, tree: Tree) -> Tree:
        """A copy of a tree on the host: large tensors on disk, small ones in memory."""

        def one(value: Tensor) -> Tensor:
            if value.nbytes < self.budget // 16:
                return value.clone() if value.device.type == "cpu" else value.cpu()
            copied = self.zeros(value.shape, value.dtype)
            self.fill(copied, value)
            return copied

        return tree_map(one, tree)


def _allocate(file: int, size: int) -> None:
    """Take the room at once, where the system can: else a full disk would be a crash later on."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)
