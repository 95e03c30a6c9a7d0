"""A run's folder. Files appear whole or not at all, carry checksums, and hold tensors and JSON only."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.numpy
import tomli_w
from safetensors.torch import load as tensors_from

from fedtailor.core.codec import build, structure
from fedtailor.core.trees import Tree, items
from fedtailor.errors import NotNow, RunError, nearest
from fedtailor.runs.config import RunConfig, parse, read_toml

CONFIG, ABOUT, METRICS, RESULTS = "config.toml", "run.json", "metrics.jsonl", "results.json"
CHECKPOINT = "checkpoint"


def write_atomically(path: Path, content: bytes) -> str:
    """Write a whole file or none of it; returns its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return hashlib.sha256(content).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """JSON with its own checksum inside."""
    text = json.dumps(value, indent=1)
    write_atomically(path, json.dumps({"sha256": _digest(text), "content": json.loads(text)}, indent=1).encode())


def read_json(path: Path) -> Any:
    """JSON written by `write_json`; changed or broken files are a `RunError`."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        content, digest = stored["content"], stored["sha256"]
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{path}: damaged; it is not the JSON that was written") from None
    if _digest(json.dumps(content, indent=1)) != digest:
        raise RunError(f"{path}: changed since it was written (checksum differs)")
    return content


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_tree(path: Path, tree: Tree) -> dict[str, Any]:
    """Tensors of a tree in safetensors; returns what `read_tree` needs."""
    content = safetensors.numpy.save({k: v.detach().contiguous().numpy() for k, v in items(tree)})
    return {"file": path.name, "sha256": write_atomically(path, content), "tree": structure(tree)}


def read_tree(folder: Path, entry: dict[str, Any]) -> Tree:
    """The tree of `write_tree`; missing or changed files are a `RunError`."""
    path = folder / Path(entry["file"]).name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise RunError(f"{path}: changed since it was written (checksum differs)")
    return build(entry["tree"], tensors_from(content))


class RunFolder:
    """Reads and writes one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, config: RunConfig, about: dict[str, Any]) -> RunFolder:
        """A new folder with the resolved configuration and what made it."""
        folder = cls(path)
        if (path / CONFIG).exists():
            raise RunError(f"{path}: holds a run already; fedtailor resume {path} goes on with it")
        content = tomli_w.dumps(config.plain()).encode()
        write_json(path / ABOUT, about | {"config_sha256": hashlib.sha256(content).hexdigest()})
        write_atomically(path / CONFIG, content)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        if not (path / CONFIG).is_file() or not (path / ABOUT).is_file():
            raise RunError(f"{path}: not a run folder (no {CONFIG}); fedtailor run CONFIG makes one")
        return cls(path)

    @property
    def config(self) -> RunConfig:
        """The resolved configuration; one that was edited no longer describes this run."""
        if hashlib.sha256((self.path / CONFIG).read_bytes()).hexdigest() != self.about["config_sha256"]:
            raise RunError(f"{self.path / CONFIG}: changed since the run was started; start a new run with it instead")
        return parse(read_toml(self.path / CONFIG), RunConfig, str(self.path / CONFIG))

    @property
    def about(self) -> dict[str, Any]:
        return read_json(self.path / ABOUT)

    @property
    def results(self) -> dict[str, Any] | None:
        """The results, or None while the run is not finished."""
        return read_json(self.path / RESULTS) if (self.path / RESULTS).exists() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may train in this folder meanwhile; the lock ends with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise NotNow(f"{self.path}: another process is working on this run") from None
            yield

    def save_checkpoint(self, status: dict[str, Any], trees: dict[str, tuple[int, Tree]]) -> None:
        """Save trees, each with the round it is of, and then the manifest: the moment at which they count."""
        folder = self.path / CHECKPOINT
        old = self._manifest() or {"trees": {}}
        entries = {}
        for name, (round, tree) in trees.items():
            file = f"{name}-{round:06d}.safetensors"
            known = old["trees"].get(name)
            entries[name] = known if known and known["file"] == file else write_tree(folder / file, tree)
        write_json(folder / "manifest.json", status | {"trees": entries})
        self._drop_stale(entries)

    def load_checkpoint(self) -> tuple[dict[str, Any], dict[str, Tree]] | None:
        """Status and trees of the last checkpoint; None before the first."""
        manifest = self._manifest()
        if manifest is None:
            return None
        return manifest, {name: read_tree(self.path / CHECKPOINT, entry) for name, entry in manifest["trees"].items()}

    def drop_stale(self) -> None:
        """Remove what a process left that was killed between manifest and clean-up; only for who holds the lock."""
        if (manifest := self._manifest()) is not None:
            self._drop_stale(manifest["trees"])

    def _drop_stale(self, entries: dict[str, Any]) -> None:
        keep = {entry["file"] for entry in entries.values()}
        for file in (self.path / CHECKPOINT).glob("*.safetensors*"):
            if file.name not in keep:
                file.unlink(missing_ok=True)

    def _manifest(self) -> dict[str, Any] | None:
        path = self.path / CHECKPOINT / "manifest.json"
        return read_json(path) if path.exists() else None

    def append_metrics(self, line: dict[str, Any]) -> int:
        """Add a round; returns the length of the file, by which a checkpoint knows how much of it counts."""
        with (self.path / METRICS).open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            return file.tell()

    def cut_metrics(self, length: int) -> None:
        """Forget rounds after the checkpoint; they are run again."""
        path = self.path / METRICS
        have = path.stat().st_size if path.exists() else 0
        if have < length:
            raise RunError(f"{path}: shorter than at the checkpoint; it was changed since it was written")
        if have:
            os.truncate(path, length)

    def metrics(self) -> list[dict[str, Any]]:
        """All recorded rounds; a last line cut short by a killed process is none."""
        path = self.path / METRICS
        whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def save_personal(self, kind: str, models: dict[str, Tree]) -> None:
        """Every client's personal model, one file each, and an index with checksums."""
        folder = self.path / "personal" / kind
        index = {
            client: write_tree(folder / f"{number:05d}-{_file_name(client)}.safetensors", tree)
            for number, (client, tree) in enumerate(models.items())
        }
        write_json(folder / "index.json", index)

    def personal(self, client: str, kind: str = "selected") -> Tree:
        """The personal model of a client, of the validation-selected round or the last one."""
        folder = self.path / "personal" / kind
        index = read_json(folder / "index.json")
        if client not in index:
            raise RunError(f'{self.path}: no client "{client}"; {nearest(client, index)}')
        return read_tree(folder, index[client])

    def new_newcomer(self, name: str) -> Path:
        """Where a newcomer of this name would be kept; refused if it cannot be the name of a folder, or is there."""
        path = self.path / "newcomers" / name
        if not name or name.startswith(".") or _file_name(name) != name:
            raise RunError(f'--name "{name}": use letters, digits, "-", "_" and "." (not first), at most 80')
        if path.exists():
            raise RunError(f"{path}: exists already; remove it or choose another --name")
        return path

    def save_newcomer(self, name: str, model: Tree, about: dict[str, Any]) -> Path:
        """A newcomer's personal model with its index, and what is known of it: a folder that appears whole."""
        path = self.new_newcomer(name)
        part = path.with_name(f".{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            write_json(part / "index.json", {name: write_tree(part / f"{name}.safetensors", model)})
            write_json(part / "newcomer.json", about)
            os.rename(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        return path

    def newcomer(self, name: str) -> Tree:
        """The personal model of a newcomer."""
        folder = self.path / "newcomers" / name
        return read_tree(folder, read_json(folder / "index.json")[name])

    def fingerprint(self) -> str:
        """sha256 over all tensors of the run: server, private states, personal models."""
        digest = hashlib.sha256()
        made = [*self.path.glob(f"{CHECKPOINT}/*.safetensors"), *self.path.glob("personal/*/*.safetensors")]
        for path in sorted(made):
            for name, value in sorted(tensors_from(path.read_bytes()).items()):
                digest.update(f"{path.relative_to(self.path)}:{name}:{list(value.shape)}:{value.dtype}".encode())
                digest.update(value.numpy().tobytes())
        return digest.hexdigest()


def _file_name(client: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in client)[:80]


def new_path(root: Path, name: str) -> Path:
    """A folder under `root` that does not exist yet: name, name-2, name-3, ..."""
    path, number = root / name, 1
    while path.exists():
        number += 1
        path = root / f"{name}-{number}"
    return path
