"""Randomness as data: a stream is named by what it is for, never by what ran before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream(*key: str | int) -> np.random.Generator:
    """The random stream of a key such as `(seed, round, client, purpose)`; equal keys give equal numbers."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@contextmanager
def torch_stream(*key: str | int) -> Iterator[None]:
    """Run code that draws from torch's global generator (nn.Module initialisers do) on the stream of a key."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(*key).integers(2**63)))
        yield
