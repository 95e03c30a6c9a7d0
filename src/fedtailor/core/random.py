"""Randomness as data: a stream is named by what it is for, never by what ran before it."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
def seeded(*key: str | int) -> Iterator[None]:
    """Let the global generators (torch's, numpy's, Python's) draw from the stream of a key; they go on as before after.

    So dropout in a model, or torch.randn in a client function, is a function of seed, round, call and client.
    """
    words = brief_stream(*key).integers(2**32, size=3, dtype="uint64").tolist()
    before = np.random.get_state(), random.getstate()  # noqa: NPY002
    with _torch_seeded(words[0]):
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
def undrawn() -> Iterator[None]:
    """Raise `Draws` if a global generator is used, which is then put back."""
    before = torch.get_rng_state(), _numpy_state(), random.getstate()
    yield
    after = torch.get_rng_state(), _numpy_state(), random.getstate()
    same_numpy = before[1][2] == after[1][2] and np.array_equal(before[1][1], after[1][1])
    if not (torch.equal(before[0], after[0]) and same_numpy and before[2] == after[2]):
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
        raise Draws("draws from a global random generator")


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002
