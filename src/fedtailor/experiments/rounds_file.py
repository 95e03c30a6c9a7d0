"""metrics.jsonl: one JSON object for each round, added as it ends, each with a checksum of its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError

CHECK = "check"  # the last key of a line


def line_of(record: dict[str, Any]) -> bytes:
    """A round as a line of the file."""
    text = json.dumps(record)
    return f'{text[:-1]}, "{CHECK}": "{_digest(text)}"}}\n'.encode()


def lines_in(path: Path, *, are_checked: bool) -> list[dict[str, Any]]:
    """All whole lines; a last one cut short by a killed process is none. Changed ones are a `RunError`."""
    try:
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    return [read_line(line, are_checked=are_checked, where=f"{path}: line {i}") for i, line in enumerate(whole, 1)]


def check_length(path: Path, length: int) -> None:
    """At the checkpoint the file had this length, and ended with a line."""
    content = path.read_bytes()[:length] if path.exists() else b""
    if len(content) < length or not content.endswith(b"\n" if length else b""):
        raise RunError(f"{path}: shorter than at the checkpoint; it was changed since it was written")


def read_line(line: bytes, *, are_checked: bool, where: str) -> dict[str, Any]:
    """A round, without its checksum; older runs have none."""
    try:
        record = json.loads(line)
        check = record.pop(CHECK, None)
    except (ValueError, RecursionError, AttributeError, TypeError):
        raise RunError(f"{where}: damaged; it is not the JSON that was written") from None
    if (are_checked or check is not None) and check != _digest(json.dumps(record)):
        raise RunError(f"{where}: changed since it was written (checksum differs)")
    return dict(record)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
