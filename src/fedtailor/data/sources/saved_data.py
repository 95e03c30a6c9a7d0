"""A federation's data in a folder: tensors in safetensors, the rest in JSON.

Mapped arrays are not copied: the folder has the path of their file and a hash of its ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedtailor.core.data import SPLITS, Chosen, FederatedData, Rows
from fedtailor.data.configs import SavedConfig
from fedtailor.data.files import expand_home
from fedtailor.data.mapped_arrays import JoinedSamples, MappedArray
from fedtailor.data.tabular.preparation import Preparation
from fedtailor.errors import DataError

TENSORS, ABOUT = "data.safetensors", "data.json"
WORDS = ("name", "task", "outputs", "clients", "classes", "features", "notes")
ENDS = 2**20  # bytes at either end of a file that are hashed


def save(data: FederatedData, folder: Path) -> None:
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {name: getattr(data, name) for name in WORDS}
    for split in SPLITS:
        rows: Rows = getattr(data, split)
        tensors |= {f"{split}.y": rows.y, f"{split}.starts": rows.starts}
        described = _describe_inputs(rows.x, f"{split}.x", tensors)
        if not isinstance(rows.x, Tensor):
            about.setdefault("inputs", {})[split] = described
    folder.mkdir(parents=True, exist_ok=True)
    about["preparation"] = None if data.preparation is None else data.preparation.model_dump(mode="json")
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / TENSORS)
    (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")


def _describe_inputs(x: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Describe inputs as JSON; their tensors are added to `tensors`."""
    if isinstance(x, Tensor):
        tensors[key] = x
        return {"tensor": key}
    if isinstance(x, dict):
        return {"named": {k: _describe_inputs(v, f"{key}.{k}", tensors) for k, v in x.items()}}
    if isinstance(x, JoinedSamples):
        return {"several": [_describe_inputs(part, f"{key}.{i}", tensors) for i, part in enumerate(x.parts)]}
    if isinstance(x, Chosen):
        tensors[f"{key}.at"] = x.at
        return {"chosen": _describe_inputs(x.whole, f"{key}.whole", tensors), "at": f"{key}.at"}
    if isinstance(x, MappedArray):
        path = expand_home(x.path).resolve()
        return {"file": str(path), "key": x.key, "scale": x.scale, "holds": _file_mark(path)}
    raise DataError(
        f"data: samples of a {type(x).__name__} read batch by batch cannot be kept with a run; name the function "
        'that makes the data, data.source = "module:load", or read it into memory (lazy=False)'
    )


def _restore_inputs(about: Any, tensors: Mapping[str, Tensor]) -> Any:
    if "tensor" in about:
        return tensors[about["tensor"]]
    if "named" in about:
        return {k: _restore_inputs(v, tensors) for k, v in about["named"].items()}
    if "several" in about:
        return JoinedSamples([_restore_inputs(part, tensors) for part in about["several"]])
    if "chosen" in about:
        return Chosen(_restore_inputs(about["chosen"], tensors), tensors[about["at"]])
    path = Path(about["file"])
    if not path.is_file():
        raise DataError(f"{path}: this file with samples of the run is no longer there; put the file back")
    if _file_mark(path) != about["holds"]:
        raise DataError(f"{path}: the file is no longer what the run was started with")
    return MappedArray(path, about["key"], about["scale"])


def _file_mark(path: Path) -> str:
    """Size of a file and a hash of its ends, as it may be too large to be read whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.blake2b(file.read(ENDS), digest_size=16)
        file.seek(max(0, size - ENDS))
        digest.update(file.read(ENDS))
    return f"{size}:{digest.hexdigest()}"


def validation_samples(config: SavedConfig) -> int:
    """Number of validation samples of all clients; only the file's header is read."""
    folder = expand_home(config.path)
    try:
        with safe_open(folder / TENSORS, "pt") as file:
            return int(file.get_slice("val.y").get_shape()[0])
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from None


def load(config: SavedConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Read what `save` wrote. Seed and `root` are not needed, as the data is split already."""
    folder = expand_home(config.path)
    try:
        tensors: dict[str, Tensor] = load_file(folder / TENSORS)
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        inputs = {s: about.get("inputs", {}).get(s, {"tensor": f"{s}.x"}) for s in SPLITS}
        rows = {s: Rows(_restore_inputs(inputs[s], tensors), tensors[f"{s}.y"], tensors[f"{s}.starts"]) for s in SPLITS}
        words: dict[str, Any] = {k: tuple(about[k]) if isinstance(about[k], list) else about[k] for k in WORDS}
        prepared = about["preparation"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    preparation = None if prepared is None else Preparation.model_validate(prepared)
    return FederatedData(train=rows["train"], val=rows["val"], test=rows["test"], preparation=preparation, **words)


def _unreadable(folder: Path, error: Exception) -> DataError:
    return DataError(f"{folder}: not a folder of data that fedtailor wrote ({error}); make it again")
