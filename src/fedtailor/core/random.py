"""Randomness as data: a stream is named by what it is for, never by what ran before it."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

STREAMS = 2  # grows when the same configuration and seed begin to draw other numbers; 1 was 0.1.0 of 2026


def stream(*key: str | int) -> np.random.Generator:
    """The random stream of a key such as `(seed, round, client, purpose)`; equal keys give equal numbers."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


class _Brief(threading.local):
    """A generator per thread whose key is set anew."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        self.fresh: Any = self.bits.state


_brief = _Brief()


def brief_stream(*key: str | int) -> np.random.Generator:
    """As `stream`, five times as fast to make; good until the next one in this thread."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    _brief.fresh["state"]["key"] = np.frombuffer(digest, dtype="<u8")
    _brief.bits.state = _brief.fresh
    return _brief.generator


@contextmanager
def torch_stream(*key: str | int) -> Iterator[None]:
    """Run code that draws from torch's global generator (nn.Module initialisers do) on the stream of a key."""
    with _torch_seeded(int(stream(*key).integers(2**63))):
        yield


@contextmanager
def _torch_seeded(seed: int) -> Iterator[None]:
    """By the generator itself: torch.manual_seed formats a stack trace for each kind of device, some ms per client."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def _device_seeded(device: torch.device | None, seed: int) -> Iterator[None]:
    """The generator of a device, which has one of its own."""
    before = _state_on(device)
    if before is None or device is None:
        yield
        return
    module = torch.get_device_module(device)
    with module.device(device) if hasattr(module, "device") else nullcontext():
        module.manual_seed(seed)
    try:
        yield
    finally:
        _put_back(before, device)


@contextmanager
def seeded(*key: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Let the global generators (torch's, numpy's, Python's, and that of a device) draw from the stream of a key; they
    go on as before after.

    So dropout in a model, or torch.randn in a client function, is a function of seed, round, call and client.
    """
    words = brief_stream(*key).integers(2**32, size=3, dtype="uint64").tolist()
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    with _torch_seeded(words[0]), _device_seeded(device, words[0]):
        np.random.seed(words[1])  # noqa: NPY002
        random.seed(words[2])
        try:
            yield
        finally:
            np.random.set_state(before[0])  # noqa: NPY002
            random.setstate(before[1])


class Draws(Exception):
    """Clients in a stack cannot draw from a global generator: each must have its own stream."""


@contextmanager
def undrawn(device: torch.device | None = None) -> Iterator[None]:
    """Raise `Draws` if a global generator, or that of the device, is used, which is then put back."""
    before = _torch_state(device), _numpy_state(), random.getstate()
    yield
    after = _torch_state(device), _numpy_state(), random.getstate()
    same_numpy = before[1][2] == after[1][2] and np.array_equal(before[1][1], after[1][1])
    same_torch = all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    if not (same_torch and same_numpy and before[2] == after[2]):
        torch.set_rng_state(before[0][0])
        if len(before[0]) > 1 and device is not None:
            _put_back(before[0][1], device)
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
        raise Draws("draws from a global random generator")


def _torch_state(device: torch.device | None) -> list[torch.Tensor]:
    on_device = _state_on(device)
    return [torch.get_rng_state()] if on_device is None else [torch.get_rng_state(), on_device]


def _state_on(device: torch.device | None) -> torch.Tensor | None:
    """Of the generator of a device; None where the CPU's serves it."""
    if device is None or device.type == "cpu" or not hasattr(torch.get_device_module(device), "get_rng_state"):
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def _put_back(state: torch.Tensor, device: torch.device) -> None:
    torch.get_device_module(device).set_rng_state(state, *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002
