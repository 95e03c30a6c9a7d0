"""Places in which training makes its results: it saves a copy, if they are what is sent in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class OutputBuffers:
    """Tensors or stacks to fill, and the norms of what was made in stacks, by client."""

    def __init__(self, places: Sequence[Tensor] = ()) -> None:
        self._free = list(places)
        self.norms: dict[int, Tensor] = {}  # by address

    def take(self, like: Tensor) -> Tensor:
        """The first free stack of the same shape and type, else a new one."""
        place = self.take_one(like)
        if place is None:
            return like.new_empty(like.shape)
        self.norms[place.data_ptr()] = place.new_empty(len(place), dtype=torch.float64)
        return place

    def take_one(self, like: Tensor) -> Tensor | None:
        """The first free place of the same shape and type, if there is one."""
        for i, place in enumerate(self._free):
            if place.shape == like.shape and place.dtype == like.dtype:
                return self._free.pop(i)
        return None

    def record_norms(self, stack: Tensor, clients: slice) -> None:
        """Some clients are done; their numbers are still in the cache."""
        if (norms := self.norms.get(stack.data_ptr())) is not None:
            norms[clients] = torch.linalg.vector_norm(stack[clients].flatten(1), dim=1).double()


_current: ContextVar[OutputBuffers | None] = ContextVar("output_buffers", default=None)


def current() -> OutputBuffers:
    return _current.get() or OutputBuffers()


@contextmanager
def output_buffers(places: Sequence[Tensor]) -> Iterator[OutputBuffers]:
    """Let training make its results in these places."""
    buffers = OutputBuffers(places)
    before = _current.set(buffers)
    try:
        yield buffers
    finally:
        _current.reset(before)
