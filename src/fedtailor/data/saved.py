"""Data of a federation that a program made: tensors in safetensors, the rest in JSON, in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from fedtailor.core.samples import SPLITS, FederatedData, Rows
from fedtailor.data.configs import SavedConfig
from fedtailor.data.preparation import Preparation
from fedtailor.errors import DataError

TENSORS, ABOUT = "data.safetensors", "data.json"
WORDS = ("name", "task", "outputs", "clients", "classes", "features", "notes")


def save(data: FederatedData, folder: Path) -> None:
    """Write a federation's data to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{split}.{part}": getattr(getattr(data, split), part).contiguous().clone()
        for split in SPLITS
        for part in ("x", "y", "starts")
    }
    about = {name: getattr(data, name) for name in WORDS}
    about["preparation"] = None if data.preparation is None else data.preparation.model_dump(mode="json")
    save_file(tensors, folder / TENSORS)
    (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")


def validation_samples(config: SavedConfig) -> int:
    """How many there are of all clients together; only the head of the file is read."""
    folder = config.path.expanduser()
    try:
        with safe_open(folder / TENSORS, "pt") as file:
            return int(file.get_slice("val.y").get_shape()[0])
    except (OSError, SafetensorError) as error:
        raise _not_ours(folder, error) from None


def load(config: SavedConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read what `save` wrote; neither seed nor `root` is needed, the split was made before."""
    folder = config.path.expanduser()
    try:
        tensors = load_file(folder / TENSORS)
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        rows = {s: Rows(tensors[f"{s}.x"], tensors[f"{s}.y"], tensors[f"{s}.starts"]) for s in SPLITS}
        words: dict[str, Any] = {k: tuple(about[k]) if isinstance(about[k], list) else about[k] for k in WORDS}
        prepared = about["preparation"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _not_ours(folder, error) from None
    preparation = None if prepared is None else Preparation.model_validate(prepared)
    return FederatedData(train=rows["train"], val=rows["val"], test=rows["test"], preparation=preparation, **words)


def _not_ours(folder: Path, error: Exception) -> DataError:
    return DataError(f"{folder}: not a folder of data that fedtailor wrote ({error}); make it again")
