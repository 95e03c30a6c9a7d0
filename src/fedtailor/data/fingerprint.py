"""What the user's own files hold, so that a run does not go on with others."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedtailor.data.configs import FolderConfig, SourceConfig
from fedtailor.data.tables import client_name


def digest(config: SourceConfig) -> str | None:
    """Of the files that a source reads from a path; None for published data, which is checked when it is downloaded."""
    given: Path | str | None = getattr(config, "path", None)
    if not isinstance(given, Path | str) or not (path := Path(given).expanduser()).exists():
        return None
    is_read = client_name if isinstance(config, FolderConfig) else bool
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file() and is_read(f))
    found = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as content:
            held = hashlib.file_digest(content, "blake2b").hexdigest()
        found.update(f"{'' if file == path else file.name}\n{held}\n".encode())
    return found.hexdigest()
