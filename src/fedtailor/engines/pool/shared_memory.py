"""Memory that a process shares with the processes it forks or spawns, and trees of tensors in it."""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.trees import Ragged, Tree, leaves, rebuild
from fedtailor.engines import machine

ALIGNED = 64  # as torch's own tensors: kernels may round otherwise where a tensor begins elsewhere
Strides = list[int] | None  # of a tensor whose numbers do not lie in the order of its indices


class Memory:
    """Shared memory without a name: gone with the last process that has it, however that ends.

    Addresses are reserved at once, as many bytes as the machine has; pages are taken when they are written.
    """

    def __init__(self, least: int = 0, *, is_sent: bool = False) -> None:
        """`is_sent`: to processes that are spawned, which get it with what they begin with."""
        self._file = os.memfd_create("fedtailor") if is_sent else -1
        self._map = _reserve(max(least, machine.memory()), least, self._file)
        self._taken: list[tuple[int, int]] = []  # begin and end, in order
        self._returned: list[int] = []  # a region may end at any moment, also while one is looked for

    def __getstate__(self) -> dict[str, Any]:
        return {"file": DupFd(self._file), "size": len(self._map)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._file = state["file"].detach()
        self._map = mmap.mmap(self._file, state["size"], flags=mmap.MAP_SHARED)
        self._taken, self._returned = [], []

    @cached_property
    def bytes(self) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def take(self, size: int) -> Region:
        """So many bytes, for as long as there is the region or a tensor in it."""
        gone = {self._returned.pop() for _ in range(len(self._returned))}
        self._taken = [span for span in self._taken if span[0] not in gone]
        size, begin = _whole(max(size, 1)), 0
        for first, last in [*self._taken, (len(self._map), 0)]:
            if first - begin >= size:
                break
            begin = last
        else:
            raise MemoryError(f"{size} bytes of shared memory are more than the machine has")
        insort(self._taken, (begin, begin + size))
        view = memoryview(self._map)[begin : begin + size]
        weakref.finalize(view, self._returned.append, begin).atexit = False
        return Region(begin, torch.frombuffer(view, dtype=torch.uint8))


@dataclass(frozen=True)
class Region:
    at: int
    bytes: Tensor


def _reserve(size: int, least: int, file: int) -> mmap.mmap:
    lazily = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python 3.11 has no name for
    while True:
        try:
            if file >= 0:
                os.ftruncate(file, _whole(size))
                return mmap.mmap(file, _whole(size), flags=mmap.MAP_SHARED | lazily)
            return mmap.mmap(-1, _whole(size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | lazily)
        except OSError:  # machines may limit what is reserved, too
            if size // 2 < max(least, 2**20):
                raise
            size //= 2


def _whole(size: int) -> int:
    return math.ceil(size / ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Layout:
    """How the tensors of a tree lie one after the other."""

    tree: Tree  # shaped as the tree, with anything for leaves
    parts: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]  # type, shape and first byte of each leaf
    size: int

    @staticmethod
    def of(tree: Tree, rows: int | None = None) -> Layout:
        """Of a tree of tensors; of a stack of so many of them with `rows`."""
        lead = () if rows is None else (rows,)
        return Layout._of_kinds(tree, [(leaf.dtype, (*lead, *leaf.shape)) for leaf in leaves(tree)])

    @staticmethod
    def from_json(plain: Any) -> Layout:
        """As `json` wrote it."""
        kinds = [(getattr(torch, name), tuple(shape)) for name, shape in plain["leaves"]]
        return Layout._of_kinds(_tree_of(plain["tree"]), kinds)

    @staticmethod
    def _of_kinds(tree: Tree, kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
        parts, end = [], 0
        for dtype, shape in kinds:
            parts.append((dtype, shape, end))
            end += _whole(math.prod(shape) * dtype.itemsize)
        return Layout(tree, tuple(parts), max(end, ALIGNED))

    def json(self) -> dict[str, Any]:
        kinds = [(str(dtype).removeprefix("torch."), shape) for dtype, shape, _ in self.parts]
        return {"tree": _description(self.tree), "leaves": kinds}

    def fits(self, tree: Tree) -> bool:
        """Whether a tree is of this shape, and its tensors of these shapes and types."""
        return _description(tree) == _description(self.tree) and [(v.dtype, v.shape) for v in leaves(tree)] == [
            (dtype, shape) for dtype, shape, _ in self.parts
        ]

    def places(self, memory: Tensor, at: int = 0) -> list[Tensor]:
        """The tensors that lie in `memory` from byte `at` on."""
        return [
            memory[at + begin : at + begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for dtype, shape, begin in self.parts
        ]

    def all_places(self, memory: Tensor, times: int) -> list[Tensor]:
        """Each tensor of the first so many trees of this layout in `memory`, stacked."""
        return [
            memory[: times * self.size]
            .view(dtype)
            .view(times, -1)[:, begin // dtype.itemsize :][:, : math.prod(shape)]
            .unflatten(1, (*shape, 1))
            .squeeze(-1)
            for dtype, shape, begin in self.parts
        ]

    def write(self, tree: Tree, memory: Tensor, at: int = 0) -> list[Strides]:
        """Put a tree there; tells how its tensors lie."""
        return put_all(self.places(memory, at), tree)

    def read(self, memory: Tensor, at: int = 0, strides: Sequence[Strides] = ()) -> Tree:
        """The tree that lies there, as `write` put it."""
        return rebuild(self.tree, iter(tensors_in(self.places(memory, at), strides)))


def put_all(places: Sequence[Tensor], tree: Tree) -> list[Strides]:
    """Copy the tensors of a tree to their places; tells how they lie, nothing if all lie in the usual order."""
    strides = [put(place, leaf.detach()) for place, leaf in zip(places, leaves(tree), strict=True)]
    return strides if any(strides) else []


def put(place: Tensor, value: Tensor) -> Strides:
    """The numbers are kept in the order in which they lie: what is computed from them may depend on it."""
    strides = None if value.is_contiguous() or not is_dense(value) else list(value.stride())
    if value.data_ptr() != place.data_ptr() or not value.numel():  # else it was made here
        _with_strides(place, strides).copy_(value)
    return strides


def tensors_in(places: Sequence[Tensor], strides: Sequence[Strides]) -> list[Tensor]:
    """The tensors that `put_all` put there."""
    return [_with_strides(p, s) for p, s in zip(places, strides, strict=True)] if strides else list(places)


def _with_strides(place: Tensor, strides: Strides) -> Tensor:
    return place if strides is None else place.as_strided(place.shape, strides)


def is_dense(value: Tensor) -> bool:
    """Whether every number has one place and there are no gaps."""
    wanted = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride != wanted:
            return False
        wanted *= size
    return True


def clone_overlapping(reply: Sequence[Tensor], places: Sequence[Tensor]) -> Sequence[Tensor]:
    """What was made in the place of another must be away before that one comes."""
    if not places:
        return reply
    begin, end = min(p.data_ptr() for p in places), max(p.data_ptr() + p.nbytes for p in places)

    def is_in_the_way(v: Tensor, place: Tensor) -> bool:
        return begin <= v.data_ptr() < end and not (v.data_ptr() == place.data_ptr() and is_dense(v))

    return [v.clone() if is_in_the_way(v, place) else v for v, place in zip(reply, places, strict=True)]


def is_at(v: Tensor, place: Tensor) -> bool:
    """Whether a tensor lies in its place as it should."""
    return (v.data_ptr(), v.shape, v.stride()) == (place.data_ptr(), place.shape, place.stride())


_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list, "Ragged": Ragged}


def _description(tree: Tree) -> Any:
    if isinstance(tree, dict):
        return {k: _description(v) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return [type(tree).__name__, *map(_description, tree)]
    return None if tree is None else 0


def _tree_of(plain: Any) -> Tree:
    if isinstance(plain, dict):
        return {k: _tree_of(v) for k, v in plain.items()}
    if isinstance(plain, list):
        return _SEQUENCES[plain[0]](map(_tree_of, plain[1:]))
    return plain
