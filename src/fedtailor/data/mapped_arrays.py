"""Samples that are read batch by batch: arrays in files, and map-style Datasets."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import Chosen
from fedtailor.core.trees import Tree, tree_map
from fedtailor.data.files import expand_home
from fedtailor.errors import DataError

KEPT = 32 * 2**20  # bytes read of a file after which its pages are released
SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "I8": "|i1"}
LONGEST_HEADER = 2**24


@dataclass(frozen=True)
class MappedArray:
    """An array [samples, ...] in a file, of which memory holds no more than a few batches.

    Args:
        path: A .npy or .safetensors file.
        key: Name of the tensor in a .safetensors file.
        scale: Turns whole numbers, such as the bytes of images, into floating point: x * scale.
        dtype: The floating-point type of samples.
    """

    path: Path
    key: str = ""  # of a tensor in a .safetensors file
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    _pages: _MappedPages = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        path = expand_home(self.path)
        try:
            about = path.stat()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        object.__setattr__(self, "_pages", _open_pages(path, self.key, about.st_size, about.st_mtime_ns))

    def __len__(self) -> int:
        return len(self._pages.array)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._pages.array.shape)

    def __getitem__(self, rows: slice) -> Chosen:
        """Some of the samples, such as those of one client; nothing is read."""
        return Chosen(self, torch.arange(len(self))[rows])

    def read(self, rows: Tensor) -> Tensor:
        """Copies of the samples with these row numbers."""
        values = torch.from_numpy(self._pages.read(rows.numpy()))
        if self.scale is not None:
            return values.to(self.dtype).mul_(self.scale)
        return values.to(self.dtype) if values.is_floating_point() else values

    def to(self, dtype: torch.dtype) -> MappedArray:
        return replace(self, dtype=dtype)


@lru_cache(maxsize=64)
def _open_pages(path: Path, key: str, size: int, changed: int) -> _MappedPages:
    """One mapping per version of a file; size and time of change are part of the cache's key."""
    return _MappedPages(path, key)


class _MappedPages:
    """A memory map that releases its pages regularly, so that a pass over it does not fill the memory."""

    def __init__(self, path: Path, key: str) -> None:
        dtype, shape, offset = _safetensors_layout(path, key) if path.suffix == ".safetensors" else _npy_layout(path)
        self.array = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
        self.since = 0

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        values = np.asarray(self.array[rows], dtype=self.array.dtype.newbyteorder("="))  # rows are copied already
        self.since += values.nbytes
        if self.since > KEPT and hasattr(mmap, "MADV_DONTNEED"):
            self.array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
            self.since = 0
        return values


def _npy_layout(path: Path) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            offset = file.tell()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not an array that numpy.save wrote: {error}") from None
    if is_fortran or dtype.hasobject or not shape:
        raise DataError(f"{path}: must be an array of numbers in C order, one sample after another")
    return dtype, shape, offset


def _safetensors_layout(path: Path, key: str) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER:
                raise ValueError("its header is too long")
            head = json.loads(file.read(length))
        if key not in head:
            raise DataError(f'{path}: no tensor "{key}"; it has {", ".join(sorted(set(head) - {"__metadata__"}))}')
        about = head[key]
        dtype, shape = np.dtype(SAFETENSORS[about["dtype"]]), tuple(about["shape"])
        first, last = about["data_offsets"]
        if last - first != dtype.itemsize * int(np.prod(shape)):
            raise ValueError(f'"{key}" has another size than its shape says')
        return dtype, shape, 8 + length + first
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise DataError(f"{path}: cannot be read as safetensors: {error}") from None


@lru_cache(maxsize=4)
def _readers(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay from batch to batch; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="fedtailor reader")


@dataclass(frozen=True)
class DatasetSamples:
    """Inputs of a map-style torch Dataset; `pick` extracts the input from an item."""

    dataset: Any
    at: Sequence[int]
    pick: Callable[[Any], Any]
    collate: Callable[[Any], Any] = torch.utils.data.default_collate
    dtype: torch.dtype | None = None
    threads: int = 0  # that read the items of a batch; 0: one after another

    def __len__(self) -> int:
        return len(self.at)

    def read(self, rows: Tensor) -> Tree:
        """Some samples, collated as by a DataLoader."""
        numbers = [self.at[i] for i in rows.tolist()]
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            items = many(numbers)
        elif self.threads > 1:
            items = list(_readers(self.threads, os.getpid()).map(self.dataset.__getitem__, numbers))
        else:
            items = [self.dataset[i] for i in numbers]
        try:
            batch = self.collate([self.pick(item) for item in items])
        except (RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"the items of a Dataset cannot be collated into a batch; pad or convert them with collate= ({reason})"
            ) from None
        return tree_map(self._cast, batch)

    def to(self, dtype: torch.dtype) -> DatasetSamples:
        return replace(self, dtype=dtype)

    def _cast(self, v: Tensor) -> Tensor:
        return v.to(self.dtype) if self.dtype is not None and v.is_floating_point() else v


class JoinedSamples:
    """Stored samples of several clients, concatenated."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.ends = torch.tensor([len(p) for p in self.parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, rows: Tensor) -> Tree:
        """Samples of a batch, which are mostly in one part."""
        if not len(rows):
            return tree_map(lambda v: v[:0], self.read(torch.tensor([0])))
        part = torch.searchsorted(self.ends, rows, right=True)
        pieces: list[tuple[Tensor, Tree]] = []
        for p in part.unique().tolist():
            at = (part == p).nonzero()[:, 0]
            begin = int(self.ends[p]) - len(self.parts[p])
            pieces.append((at, self.parts[p].read(rows[at] - begin)))
        if len(pieces) == 1:
            return pieces[0][1]
        order = torch.cat([at for at, _ in pieces]).argsort()
        return tree_map(lambda *each: torch.cat(each)[order], *(values for _, values in pieces))

    def to(self, dtype: torch.dtype) -> JoinedSamples:
        return JoinedSamples([p.to(dtype) for p in self.parts])
