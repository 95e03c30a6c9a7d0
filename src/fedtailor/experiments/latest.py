"""A fit that was updated: which of the folders in it holds the models that serve now."""

from __future__ import annotations

from pathlib import Path

from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json, write_json

CURRENT, UPDATE = "current.json", "update-"


def latest(path: Path) -> Path:
    """The folder of the last complete update of a fit; any other folder is itself."""
    if not (path / CURRENT).is_file():
        return path
    name = read_json(path / CURRENT)["folder"]
    if not isinstance(name, str) or not name.removeprefix(UPDATE).isdecimal() or not name.startswith(UPDATE):
        raise RunError(f"{path / CURRENT}: names {name!r}, which is no update", code="run.damaged")
    return path / name


def root_of(path: Path) -> Path:
    """The folder of the first fit, given that or the folder of an update."""
    is_update = path.name.startswith(UPDATE) and (path.parent / CURRENT).is_file()
    return path.parent if is_update else path


def number_of(path: Path) -> int:
    """How many updates a fit has had."""
    folder = latest(path)
    return 0 if folder == path else int(folder.name.removeprefix(UPDATE))


def make_current(root: Path, folder: Path) -> None:
    """From now on the models of this folder serve; one file is replaced, so it is these or the earlier ones."""
    write_json(root / CURRENT, {"folder": folder.name})
