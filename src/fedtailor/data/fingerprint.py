"""A hash of the user's own files, so that a run is not continued with different data."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedtailor.data.configs import FolderConfig, ImageFolderConfig, ImageMasksConfig, SourceConfig, TextConfig
from fedtailor.data.files import client_name, expand_home
from fedtailor.data.sources.image_folder import list_images
from fedtailor.data.sources.mask_folder import list_pairs


def digest(config: SourceConfig) -> str | None:
    """Hash of the files that a source reads; None for published data, which is verified when it is downloaded."""
    source_path: Path | str | None = getattr(config, "path", None)
    if not isinstance(source_path, Path | str) or not (path := expand_home(source_path)).exists():
        return None
    is_read = client_name if isinstance(config, FolderConfig | TextConfig) else bool
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file() and is_read(f))
    if isinstance(config, ImageFolderConfig):
        files = [*([path] if path.is_file() else []), *(entry.path for entry in list_images(config))]
    if isinstance(config, ImageMasksConfig):
        files = [file for pairs in list_pairs(config).values() for pair in pairs for file in pair]
    if isinstance(config, FolderConfig) and path.is_dir():
        files = [file for file in files if client_name(file) not in config.without]
    hasher = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as content:
            file_hash = hashlib.file_digest(content, "blake2b").hexdigest()
        name = file.relative_to(path) if file.is_relative_to(path) else file
        hasher.update(f"{'' if file == path else name}\n{file_hash}\n".encode())
    return hasher.hexdigest()
