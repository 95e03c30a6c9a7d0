"""A run's folder. Files appear whole or not at all, carry checksums, and hold tensors and JSON only."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedtailor.core.codec import build, structure
from fedtailor.core.trees import Tree, items
from fedtailor.data.tabular.preparation import Preparation
from fedtailor.errors import RetryableError, RunError, nearest
from fedtailor.experiments import records
from fedtailor.experiments.config import RunConfig, parse, read_toml
from fedtailor.experiments.json_text import indented
from fedtailor.experiments.locking import hold, owner
from fedtailor.experiments.records import checked
from fedtailor.experiments.rounds_file import check_length, line_of, lines_in
from fedtailor.experiments.tensor_file import Touch, pieces

CONFIG, ABOUT, METRICS, RESULTS = "config.toml", "run.json", "metrics.jsonl", "results.json"
CHECKPOINT, PREPARATION, FIT, LOCK = "checkpoint", "preparation.json", "fit.json", ".lock"
CHANGED = "changed since it was written (checksum differs)"


def write_atomically(path: Path, content: bytes | Iterable[bytes | memoryview]) -> str:
    """Write a whole file or none of it, at once or piece by piece; returns its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    digest = hashlib.sha256()
    try:
        with part.open("wb") as file:
            for piece in (content,) if isinstance(content, bytes) else content:
                file.write(piece)
                digest.update(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """JSON with its own checksum inside."""
    text = indented(value)
    checked = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": json.loads(text)}
    write_atomically(path, indented(checked).encode())


def read_json(path: Path) -> Any:
    """JSON written by `write_json`; changed or broken files are a `RunError`."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        content, digest = stored["content"], stored["sha256"]
        is_changed = hashlib.sha256(indented(content).encode()).hexdigest() != digest
    except FileNotFoundError:
        raise RunError(f"{path}: no such file", code="run.damaged") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise RunError(f"{path}: damaged; it is not the JSON that was written", code="run.damaged") from None
    if is_changed:
        raise RunError(f"{path}: {CHANGED}", code="run.damaged")
    return _recorded(content, path)


class Record(dict[str, Any]):
    """An object that was read from a file. Other versions may have written less: a key that lacks is a `RunError`."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> Any:
        other = f'has no "{key}", so another version of fedtailor wrote it; start the run anew'
        raise RunError(f"{self.path}: {other}", code="run.version")


def _recorded(content: Any, path: Path) -> Any:
    if isinstance(content, dict):
        return Record({key: _recorded(value, path) for key, value in content.items()}, path)
    return [_recorded(value, path) for value in content] if isinstance(content, list) else content


def write_tree(path: Path, tree: Tree, touch: Touch | None = None) -> dict[str, Any]:
    """Tensors of a tree in safetensors; returns what `read_tree` needs."""
    digest = write_atomically(path, pieces(dict(items(tree)), touch or (lambda size: None)))
    return {"file": path.name, "sha256": digest, "tree": structure(tree)}


def read_tree(folder: Path, entry: dict[str, Any]) -> Tree:
    """The tree of `write_tree`; missing or changed files are a `RunError`."""
    path = folder / Path(entry["file"]).name
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    if digest != entry["sha256"]:
        raise RunError(f"{path}: {CHANGED}", code="run.damaged")
    try:
        aligned = {name: v.clone() for name, v in load_file(path).items()}  # or kernels may round otherwise
        return build(entry["tree"], aligned)
    except (SafetensorError, LookupError, TypeError, ValueError) as error:  # a fitting checksum of nonsense
        raise RunError(f"{path}: not the tensors that its index tells of ({error})") from None


class RunFolder:
    """Reads and writes one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, path: Path, config: RunConfig, about: dict[str, Any], preparation: Preparation | None = None
    ) -> RunFolder:
        """A new folder with the resolved configuration, what made it and, of tables, how columns are prepared."""
        folder = cls(path)
        if (path / CONFIG).exists():
            hint = f"continue it with: fedtailor resume {shlex.quote(str(path))}"
            raise RunError(f"{path}: holds a run already; {hint}", code="run.exists")
        content = tomli_w.dumps(config.plain()).encode()
        if preparation is not None:
            write_json(path / PREPARATION, preparation.model_dump(mode="json"))
        write_json(path / ABOUT, about | {"config_sha256": hashlib.sha256(content).hexdigest()})
        write_atomically(path / CONFIG, content)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        if not (path / CONFIG).is_file() or not (path / ABOUT).is_file():
            raise RunError(f"{path}: {_instead_of_a_run(path)}", code="run.none")
        return cls(path)

    @property
    def config(self) -> RunConfig:
        """The resolved configuration; one that was edited no longer describes this run."""
        if hashlib.sha256((self.path / CONFIG).read_bytes()).hexdigest() != self.about["config_sha256"]:
            why = "changed since the run was started; start a new run with it instead"
            raise RunError(f"{self.path / CONFIG}: {why}", code="run.changed")
        return parse(read_toml(self.path / CONFIG), RunConfig, str(self.path / CONFIG))

    @property
    def about(self) -> dict[str, Any]:
        path = self.path / ABOUT
        about: dict[str, Any] = checked(read_json(path), records.ABOUT, path)
        if "train_samples" in about and len(about["train_samples"]) != len(about["clients"]):
            raise RunError(f"{path}: as many train_samples as clients are needed", code="run.damaged")
        return about

    @property
    def results(self) -> dict[str, Any] | None:
        """The results, or None while the run is not finished."""
        path = self.path / RESULTS
        return checked(read_json(path), records.RESULTS, path) if path.exists() else None

    @property
    def preparation(self) -> Preparation | None:
        """How a table is prepared for the run's models; None if the run does not read tables, or is an old one."""
        path = self.path / PREPARATION
        return Preparation.model_validate(read_json(path)) if path.exists() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else may train in this folder meanwhile; the lock ends with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a+") as file:
            try:
                hold(file)
            except OSError:
                raise RetryableError(f"{self.path}: another process is working on this run{owner(file)}") from None
            yield

    def save_checkpoint(
        self, status: dict[str, Any], trees: dict[str, tuple[int, Tree]], touch: Touch | None = None
    ) -> None:
        """Save trees, each with the round it is of, and then the manifest: the moment at which they count."""
        folder = self.path / CHECKPOINT
        old = self._manifest() or {"trees": {}}
        entries = {}
        for name, (round, tree) in trees.items():
            file = f"{name}-{round:06d}.safetensors"
            known = old["trees"].get(name)
            entries[name] = known if known and known["file"] == file else write_tree(folder / file, tree, touch)
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
        return checked(read_json(path), records.MANIFEST, path) if path.exists() else None

    def append_metrics(self, line: dict[str, Any]) -> int:
        """Add a round; returns the length of the file, by which a checkpoint knows how much of it counts."""
        with (self.path / METRICS).open("ab") as file:
            file.write(line_of(line))
            return file.tell()

    def cut_metrics(self, length: int) -> None:
        """Forget rounds after the checkpoint; they are run again."""
        path = self.path / METRICS
        check_length(path, length)
        if path.exists():
            os.truncate(path, length)

    def check_rounds(self) -> None:
        """Whether the rounds before the checkpoint of an unfinished run are still there."""
        if not (self.path / RESULTS).exists() and (manifest := self._manifest()) is not None:
            check_length(self.path / METRICS, manifest.get("metrics_length", 0))

    def metrics(self) -> list[dict[str, Any]]:
        """All recorded rounds; a last line cut short by a killed process is none."""
        self.check_rounds()
        path, results = self.path / METRICS, self.results
        about = self.about if (self.path / ABOUT).exists() else {}
        lines = lines_in(path, are_checked=about.get("checked_lines") is True)
        if results is not None and len(lines) != results.get("lines", len(lines)):
            raise RunError(f"{path}: has {len(lines)} rounds; when the run ended it had {results['lines']}")
        return [_recorded(line, path) for line in lines]

    @contextmanager
    def personal_models(self, kind: str) -> Iterator[Callable[[str, Tree], None]]:
        """Keeps personal models, one file each as they come, and in the end an index with checksums."""
        folder, clients = self.path / "personal" / kind, self.about["clients"]
        index: dict[str, Any] = {}
        number = {client: i for i, client in enumerate(clients)}

        def keep(client: str, model: Tree) -> None:
            file = f"{number.get(client, len(index)):05d}-{_file_name(client)}.safetensors"
            index[client] = write_tree(folder / file, model)

        yield keep
        if index:  # a site of its own keeps its model itself
            write_json(folder / "index.json", {c: index[c] for c in [*clients, *index] if c in index})

    def personal(self, client: str, kind: str = "selected") -> Tree:
        """The personal model of a client, of the validation-selected round or the last one."""
        folder = self.path / "personal" / kind
        index = checked(read_json(folder / "index.json"), records.INDEX, folder / "index.json")
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
        return read_tree(folder := self.path / "newcomers" / name, read_json(folder / "index.json")[name])

    def fingerprint(self) -> str:
        """sha256 over all tensors of the run: server, private states, personal models."""
        digest = hashlib.sha256()
        files = [*self.path.glob(f"{CHECKPOINT}/*.safetensors"), *self.path.glob("personal/*/*.safetensors")]
        for path in sorted(files):
            for name, value in sorted(load_file(path).items()):
                digest.update(f"{path.relative_to(self.path)}:{name}:{list(value.shape)}:{value.dtype}".encode())
                digest.update(value.numpy().tobytes())
        return digest.hexdigest()


def _instead_of_a_run(path: Path) -> str:
    """What a folder without a run is, and which runs are in it."""
    inside = sorted(about.parent.name for about in path.glob(f"*/{ABOUT}"))
    is_fit = (path / FIT).is_file()
    if not inside and not is_fit:
        return f"not a run folder (no {CONFIG}); fedtailor run CONFIG makes one"
    kind, command = ("a fit", "fedtailor fit") if is_fit else ("a folder of runs", "command")
    hint = f"{kind}, not a single run; continue with the same {command} and --out {shlex.quote(str(path))}"
    if not inside:
        return hint
    names = ", ".join(inside[:8]) + (", ..." if inside[8:] else "")
    return f"{hint}; or name one of its runs ({names}), such as {shlex.quote(str(path / inside[0]))}"


def _file_name(client: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in client)[:80]


def new_path(root: Path, name: str) -> Path:
    """A folder under `root` that does not exist yet: name, name-2, name-3, ..."""
    names = (name if n == 1 else f"{name}-{n}" for n in count(1))
    return next(path for path in (root / each for each in names) if not path.exists())
