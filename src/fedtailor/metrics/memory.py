"""What a computation holds in memory at its worst moment, exactly: counted by tensor, not read off the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedtailor.core.model import Model


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have made and nobody has let go."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for v in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(v, Tensor):
                self._add(v.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def megabytes(forward: Callable[[], Tensor]) -> float:
    """Peak of the tensors made in a forward and a backward pass."""
    with Live() as live:
        forward().square().mean().backward()
    return live.peak / 2**20


def training_step(model: Model, x: Tensor) -> float:
    """Megabytes at the peak of one training step on a batch, parameters and batch not counted."""
    params = {k: v.detach().clone().requires_grad_(k in model.trainable) for k, v in model.params.items()}
    buffers = {k: v.clone() for k, v in model.private_buffers.items()}
    return megabytes(lambda: model(params | buffers, x, training=True))
