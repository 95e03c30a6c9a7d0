"""What a fit is made of and where it lies: its folder belongs to one fit, of the same data and code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtailor.data import SOURCES
from fedtailor.data.fingerprint import digest
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.store import CONFIG, FIT, read_json, write_json
from fedtailor.experiments.user_source import code_difference, code_of
from fedtailor.studies.grid import Cell
from fedtailor.studies.model_selection import CAUTION

LOADER = re.compile(r"[\w.]+:\w+")


def source_of(
    sites: str | Path, target: str = "", client_column: str | None = None, **of_target: str
) -> dict[str, Any]:
    """The table [data] for what a user names: own files, a source, or a function of hers as "module:load".

    of_target: task and target_scale, where they are said.
    """
    name = str(sites)
    if not Path(sites).exists() and (name in SOURCES or LOADER.fullmatch(name)):
        if target or client_column or any(of_target.values()):
            raise ConfigError(
                f"fit {name}: the source knows what to predict; leave out --target, --client-column, --task and "
                "--target-scale"
            )
        return {"source": name}
    if not target:
        raise ConfigError(f"{name}: which column is to be predicted? Name it with --target")
    files = {"source": "folder", "path": name, "target": target} | {k: v for k, v in of_target.items() if v}
    return files if client_column is None else files | {"client_column": client_column}


def claimed(out: Path, algorithm: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """A folder belongs to one fit, and the same fit goes on in it."""
    code = [code_of(cell.config) for cell in cells]
    claim = {
        "algorithm": algorithm,
        "caution": CAUTION,
        "runs": [cell.config.plain() for cell in cells],
        "files": digest(cells[0].config.data),
        "code": code,
    }
    path = out / FIT
    if path.exists():
        current: dict[str, Any] = {key: claim[key] for key in ("files", "code")}  # of which older folders do not tell
        saved = current | read_json(path)["settings"]
        if saved | current != claim:
            raise RunError(f"{out}: holds another fit; choose another folder with --out")
        if saved["files"] != claim["files"]:
            raise RunError(f"{out}: the data is no longer what it was fitted to; choose another folder with --out")
        changes = (code_difference(old, new) for old, new in zip(saved["code"], code, strict=False))
        if change := next(filter(None, changes), ""):
            raise RunError(f"{out}: {change} since it was fitted; choose another folder with --out")
        return claim
    if out.exists() and any(out.glob(f"*/{CONFIG}")):
        raise RunError(f"{out}: holds other runs; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, {"settings": claim})
    return claim
