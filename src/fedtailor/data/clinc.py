"""CLINC150: requests to an assistant. Larson et al., EMNLP 2019. What is outside of all intents is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.samples import FederatedData
from fedtailor.data import partitions
from fedtailor.data.configs import Clinc150Config
from fedtailor.data.files import data_root, locate, read_bytes
from fedtailor.data.images import assemble
from fedtailor.data.splits import Indices, client_names
from fedtailor.errors import DataError

SENTENCES, DOMAINS = "clinc150/data_full.json.gz", "clinc150/domains.json"
PARTS = ("train", "val", "test")  # pooled: each client's samples are split again
PADDING = 0


@dataclass(frozen=True)
class Requests:
    """All sentences with their intents."""

    sentences: tuple[str, ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    note: str
    encode: Callable[[Sequence[str]], NDArray[np.int64]]

    def convert(self, index: Indices) -> tuple[Tensor, Tensor]:
        """Token ids and intents of some of them."""
        x = self.encode([self.sentences[i] for i in index])
        return torch.from_numpy(x), torch.from_numpy(self.labels[index])


def load(config: Clinc150Config, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read, deal and split the sentences that a configuration asks for."""
    folder = data_root(root)
    domains = _domains(locate(folder, DOMAINS, config.source))
    intents = tuple(sorted(intent for own in domains.values() for intent in own))
    sentences, labels = _sentences(locate(folder, SENTENCES, config.source), intents)
    encode = _by_hash(config.vocabulary, config.length) if config.tokenizer is None else _by_file(config)
    words = f"{config.vocabulary} hashes of words" if config.tokenizer is None else f"tokens of {config.tokenizer.name}"
    pool = Requests(sentences, labels, intents, f"{words}, {config.length} of each sentence", encode)
    of_intent = {intent: number for number, own in enumerate(domains.values()) for intent in own}
    domain = np.array([of_intent[intents[label]] for label in labels])
    if config.partition == "domain":
        if config.clients != len(domains):
            raise DataError(f'data.clients = {config.clients}: partition "domain" makes {len(domains)} clients')
        parts, names = partitions.natural(domain), tuple(domains)
    else:
        by = domain if config.partition == "domains" else labels
        parts = partitions.dirichlet(by, config.clients, seed, config.alpha)
        names = client_names(len(parts))
    notes = (f"partition: {config.partition}", *partitions.describe(parts, labels))
    return assemble(config.source, pool, parts, names, config, seed, notes)


def _by_hash(vocabulary: int, length: int) -> Callable[[Sequence[str]], NDArray[np.int64]]:
    def encode(sentences: Sequence[str]) -> NDArray[np.int64]:
        ids = [[1 + crc32(w.encode()) % (vocabulary - 1) for w in re.findall(r"\w+", s.lower())] for s in sentences]
        return _padded(ids, length)

    return encode


def _by_file(config: Clinc150Config) -> Callable[[Sequence[str]], NDArray[np.int64]]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(
            "data.tokenizer: the package tokenizers is missing; pip install 'fedtailor[adapters]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(config.tokenizer))
    except Exception as error:  # tokenizers has no type of its own
        raise DataError(f"data.tokenizer: {config.tokenizer} cannot be read ({error})") from None
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.length)
    return lambda sentences: _padded([e.ids for e in tokenizer.encode_batch(list(sentences))], config.length)


def _padded(ids: list[list[int]], length: int) -> NDArray[np.int64]:
    return np.array([row[:length] + [PADDING] * (length - len(row)) for row in ids], np.int64).reshape(-1, length)


def _domains(path: Path) -> dict[str, list[str]]:
    try:
        domains = {str(name): [str(intent) for intent in own] for name, own in json.loads(read_bytes(path)).items()}
    except (ValueError, AttributeError, TypeError):
        raise DataError(f"{path}: must be JSON of the form {{domain: [intent, ...]}}; put it there again") from None
    return dict(sorted(domains.items()))


def _sentences(path: Path, intents: tuple[str, ...]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    number = {intent: i for i, intent in enumerate(intents)}
    try:
        content = json.loads(read_bytes(path))
        pairs = [(str(sentence), number[intent]) for part in PARTS for sentence, intent in content[part]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: must be JSON of the form {{train: [[sentence, intent], ...], val, test}} with intents of "
            f"{DOMAINS} ({error}); put it there again"
        ) from None
    sentences, labels = zip(*pairs, strict=True)
    return tuple(sentences), np.array(labels, np.int64)
