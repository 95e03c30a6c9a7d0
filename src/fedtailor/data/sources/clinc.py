"""CLINC150: requests to an assistant (Larson et al., EMNLP 2019), without those outside of all intents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData
from fedtailor.data import partitions
from fedtailor.data.configs import Clinc150Config
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import read_bytes
from fedtailor.data.pools import split_pool
from fedtailor.data.splits import client_names
from fedtailor.data.tokens import SentencePool, encoder
from fedtailor.errors import DataError

SENTENCES, DOMAINS = "clinc150/data_full.json.gz", "clinc150/domains.json"
PARTS = ("train", "val", "test")  # pooled: each client's samples are split again


def load(config: Clinc150Config, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read, distribute and split the sentences of a configuration."""
    folder = data_root(root)
    domains = _domains(locate(folder, DOMAINS, config.source))
    intents = tuple(sorted(intent for own in domains.values() for intent in own))
    sentences, labels = _sentences(locate(folder, SENTENCES, config.source), intents)
    encode, words = encoder(config.tokenizer, config.vocabulary, config.length)
    pool = SentencePool(sentences, labels, intents, words, encode)
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
    return split_pool(config.source, pool, parts, names, config, seed, notes)


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
