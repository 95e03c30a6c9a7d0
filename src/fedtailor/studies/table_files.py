"""The files of a table, and beside them their checksums: a table that was changed since is named, and not shown."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from fedtailor.errors import RunError
from fedtailor.experiments.store import CHANGED, read_json, write_atomically, write_json

SUMS = "tables.json"


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files by name."""
    write_json(folder / SUMS, {name: write_atomically(folder / name, text.encode()) for name, text in texts.items()})


def read(folder: Path, name: str) -> str:
    """A file as it was written; a folder of an earlier version has no checksums."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise RunError(f"{folder / name}: cannot be read: {error.strerror}") from None
    if (folder / SUMS).exists() and hashlib.sha256(content).hexdigest() != read_json(folder / SUMS)[name]:
        raise RunError(f"{folder / name}: {CHANGED}; the same command writes it again", code="run.damaged")
    return content.decode("utf-8", errors="replace")
