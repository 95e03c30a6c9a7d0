"""Your own sentences and their labels, in tables: one file per client, or one file with a column that names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtailor.core.data import FederatedData
from fedtailor.data import partitions
from fedtailor.data.configs import TextConfig
from fedtailor.data.files import client_name, expand_home
from fedtailor.data.pools import split_pool
from fedtailor.data.tabular.read import read_text_columns
from fedtailor.data.tokens import SentencePool, encoder
from fedtailor.errors import DataError


def load(config: TextConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read sentences, convert them to token ids, and split each client's."""
    rows = _rows(config)
    clients, classes = sorted({r[0] for r in rows}), sorted({r[2] for r in rows})
    if len(classes) < 2:
        raise DataError(
            f'{config.path}: column "{config.target}" has only the class "{classes[0]}"; at least two are needed'
        )
    number = {label: i for i, label in enumerate(classes)}
    labels = np.array([number[label] for _, _, label in rows], np.int64)
    owner = {client: i for i, client in enumerate(clients)}
    parts = partitions.natural(np.array([owner[client] for client, _, _ in rows], np.int64))
    encode, words = encoder(config.tokenizer, config.vocabulary, config.length)
    pool = SentencePool(tuple(sentence for _, sentence, _ in rows), labels, tuple(classes), words, encode)
    notes = ("partition: the clients of the files", *partitions.describe(parts, labels))
    return split_pool(config.path.stem, pool, parts, tuple(clients), config, seed, notes)


def _rows(config: TextConfig) -> list[tuple[str, ...]]:
    path = expand_home(config.path)
    if path.is_dir():
        if config.client_column is not None:
            raise DataError("data.client_column: only where data.path is one file; here each client has its own")
        files = {name: file for file in sorted(path.iterdir()) if (name := client_name(file)) is not None}
        if not files:
            raise DataError(f"{path}: has no .csv, .tsv or .parquet file; one for each client")
        return [
            (name, *row) for name, file in files.items() for row in read_text_columns(file, config.text, config.target)
        ]
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; set data.path")
    if config.client_column is None:
        raise DataError("data.client_column: name the column that tells whose a row is, or give a folder of files")
    return read_text_columns(path, config.client_column, config.text, config.target)
