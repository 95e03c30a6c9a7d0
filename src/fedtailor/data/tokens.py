"""Sentences as rows of token ids, from a model's tokenizer or from hashes of words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.splits import Indices
from fedtailor.errors import DataError

PADDING = 0

Encode = Callable[[Sequence[str]], NDArray[np.int64]]


@dataclass(frozen=True)
class SentencePool:
    sentences: tuple[str, ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    note: str
    encode: Encode

    def convert(self, index: Indices) -> tuple[Tensor, Tensor]:
        """Token ids and labels of some sentences."""
        x = self.encode([self.sentences[i] for i in index])
        return torch.from_numpy(x), torch.from_numpy(self.labels[index])


def encoder(tokenizer: Path | None, vocabulary: int, length: int) -> tuple[Encode, str]:
    """A function from sentences to rows of `length` token ids, and a note that describes it."""
    if tokenizer is None:
        return _by_hash(vocabulary, length), f"{vocabulary} hashes of words, {length} of each sentence"
    return _by_file(tokenizer, length), f"tokens of {tokenizer.name}, {length} of each sentence"


def _by_hash(vocabulary: int, length: int) -> Encode:
    def encode(sentences: Sequence[str]) -> NDArray[np.int64]:
        ids = [[1 + crc32(w.encode()) % (vocabulary - 1) for w in re.findall(r"\w+", s.lower())] for s in sentences]
        return _pad(ids, length)

    return encode


def _by_file(path: Path, length: int) -> Encode:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            "data.tokenizer: the package tokenizers is missing; pip install 'fedtailor[adapters]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers has no type of its own
        raise DataError(f"data.tokenizer: {path} cannot be read ({error})") from None
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    return lambda sentences: _pad([e.ids for e in tokenizer.encode_batch(list(sentences))], length)


def _pad(ids: list[list[int]], length: int) -> NDArray[np.int64]:
    return np.array([row[:length] + [PADDING] * (length - len(row)) for row in ids], np.int64).reshape(-1, length)
