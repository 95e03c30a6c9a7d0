"""A run's folder: the only code that writes one. Files appear whole or not at all, carry checksums, and hold tensors
and JSON only.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, NotRequired

import tomli_w
import torch
from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from fedtailor.core.codec import build, structure
from fedtailor.core.trees import Tree, items, leaves, schema, tree_map
from fedtailor.data.tabular.preparation import Preparation
from fedtailor.errors import RetryableError, RunError, nearest
from fedtailor.experiments.config import RunConfig, parse, read_toml

CONFIG, ABOUT, METRICS, RESULTS = "config.toml", "run.json", "metrics.jsonl", "results.json"
CHECKPOINT, PREPARATION, FIT, LOCK = "checkpoint", "preparation.json", "fit.json", ".lock"
CURRENT, UPDATE = "current.json", "update-"  # which folder of an updated fit serves now
CHECK = "check"  # the last key of a line of metrics.jsonl
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tabs and ends of lines
ESCAPES = re.compile(rb"\\u00[0189][0-9a-fA-F]|\\u007|\x7f|\xc2[\x80-\x9f]")  # as JSON has them
CHANGED = "changed since it was written (checksum differs)"
DTYPES = {  # as safetensors names them
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SLICE = 2**24  # numbers that are written at once
MANY = 100  # clients, above which small personal models share files
SMALL = 2**16  # bytes of such a model
TOGETHER = 2**24  # bytes of such a file
Touch = Callable[[int], None]  # told how many bytes were read


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
    text = json_text(value)
    with_checksum = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": json.loads(text)}
    write_atomically(path, json_text(with_checksum).encode())


def read_json(path: Path) -> Any:
    """JSON written by `write_json`; changed or broken files are a `RunError`."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        content, digest = stored["content"], stored["sha256"]
        is_changed = hashlib.sha256(json_text(content).encode()).hexdigest() != digest
    except FileNotFoundError:
        raise RunError(f"{path}: no such file", code="run.damaged") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise RunError(f"{path}: damaged; it is not the JSON that was written", code="run.damaged") from None
    if is_changed:
        raise RunError(f"{path}: {CHANGED}", code="run.damaged")
    return _as_recorded(content, path)


class RecordedObject(dict[str, Any]):
    """An object that was read from a file. Other versions may have written less: a key that lacks is a `RunError`."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> Any:
        other = f'has no "{key}", so another version of fedtailor wrote it; start a new run'
        raise RunError(f"{self.path}: {other}", code="run.version")


def _as_recorded(content: Any, path: Path) -> Any:
    if isinstance(content, dict):
        return RecordedObject({printable(key): _as_recorded(value, path) for key, value in content.items()}, path)
    return [_as_recorded(value, path) for value in content] if isinstance(content, list) else printable(content)


def printable(value: Any) -> Any:
    """Text without control characters, with which a file from somebody else could change what a terminal shows."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value


def json_text(value: Any, level: int = 0) -> str:
    """The same text as `json.dumps(value, indent=1)`.

    The library's own writer leaves a cycle of closures behind with every call; a site that writes several files in each
    round keeps them until the next full collection, which is rare in a process that has torch loaded.
    """
    inner, outer = "\n" + " " * (level + 1), "\n" + " " * level
    if isinstance(value, dict) and value:
        pairs = [f"{_key(key)}: {json_text(held, level + 1)}" for key, held in value.items()]
        return "{" + inner + ("," + inner).join(pairs) + outer + "}"
    if isinstance(value, list | tuple) and value:
        return "[" + inner + ("," + inner).join([json_text(held, level + 1) for held in value]) + outer + "]"
    if type(value) is str:
        return encode_basestring_ascii(value)
    if type(value) is float and math.isfinite(value):
        return float.__repr__(value)
    return json.dumps(value)


def _key(key: Any) -> str:
    """Names are text; numbers, true, false and null are put in quotes."""
    if type(key) is str:
        return encode_basestring_ascii(key)
    if not isinstance(key, str):
        key = next(iter(json.loads(json.dumps({key: None}))))
    return json.dumps(key)


def safetensors_pieces(tensors: dict[str, Tensor], touch: Touch) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, slice by slice: the library makes all of them at once."""
    header, end = {}, 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format has it, so that the numbers are aligned
    yield len(text).to_bytes(8, "little") + text
    for value in tensors.values():
        flat = value.detach().reshape(-1)
        for i in range(0, len(flat), SLICE):
            yield flat[i : i + SLICE].contiguous().cpu().numpy().data
            touch(flat[i : i + SLICE].nbytes)


def write_tree(path: Path, tree: Tree, touch: Touch | None = None) -> dict[str, Any]:
    """Tensors of a tree in safetensors; returns what `read_tree` needs."""
    digest = write_atomically(path, safetensors_pieces(dict(items(tree)), touch or (lambda size: None)))
    return {"file": path.name, "sha256": digest, "tree": structure(tree)}


def read_tree(folder: Path, entry: dict[str, Any]) -> Tree:
    """The tree of `write_tree`; missing or changed files are a `RunError`."""
    path = folder / Path(entry["file"]).name
    tensors = _read_tensors(path, entry["sha256"]) if entry["file"] else {}
    for part in entry.get("parts", ()):
        path = folder.parent / part_of(folder.parent, part["folder"]).name / Path(part["file"]).name
        known = _read_tensors(path, part["sha256"])
        if missing := [name for name in part["names"] if name not in known]:
            raise RunError(f'{path}: has no "{missing[0]}", which an index looks for in it')
        tensors |= {name: known[name] for name in part["names"]}
    try:
        return build(entry["tree"], tensors)
    except (LookupError, TypeError, ValueError) as error:  # a fitting checksum of nonsense
        raise RunError(f"{path}: not the tensors that its index tells of ({error})") from None


def _read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    if digest != sha256:
        raise RunError(f"{path}: {CHANGED}", code="run.damaged")
    try:
        return {name: v.clone() for name, v in load_file(path).items()}  # aligned, or kernels may round otherwise
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not the tensors that its index tells of ({error})") from None


class KnownTensors:
    """Where the tensors of the personal models of a run are, by name and content: each is written once."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, bytes], tuple[str, str, str]] = {}  # folder, file and its checksum

    def write(self, path: Path, tree: Tree) -> dict[str, Any]:
        """A tree as `write_tree` has it, but for tensors that a file of the run has already, of which it says where."""
        tensors = dict(items(tree))
        keys = {name: (name, _content_digest(v)) for name, v in tensors.items()}
        new = {name: v for name, v in tensors.items() if keys[name] not in self._places}
        parts: dict[tuple[str, str, str], list[str]] = {}
        for name in tensors.keys() - new.keys():
            parts.setdefault(self._places[keys[name]], []).append(name)
        entry: dict[str, Any] = {"file": "", "sha256": "", "tree": structure(tree)}
        if new or not tensors:
            written = write_tree(path, new)
            entry |= {"file": written["file"], "sha256": written["sha256"]}
            self._places |= dict.fromkeys(
                (keys[name] for name in new), (path.parent.name, entry["file"], entry["sha256"])
            )
        if parts:
            entry["parts"] = [
                {"folder": folder, "file": file, "sha256": digest, "names": sorted(names)}
                for (folder, file, digest), names in sorted(parts.items())
            ]
        return entry


def _content_digest(value: Tensor) -> bytes:
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode())
    for piece in value.detach().reshape(-1).split(SLICE):
        digest.update(piece.contiguous().cpu().numpy().data)
    return digest.digest()


# What the JSON files of a run must look like, whoever wrote them: a checksum that fits does not make them ours.
LENIENT = ConfigDict(strict=True, extra="allow")  # other versions may have more or fewer keys, never other types
Figures = dict[str, list[float]]  # by metric, one per client


@with_config(LENIENT)
class AboutFile(TypedDict, total=False):
    """run.json: what made the run, as far as more is done with it than to show it."""

    clients: list[str]
    train_samples: list[int]
    notes: list[str]
    classes: list[str]
    outputs: int
    parameters: int
    ranks: int
    task: str
    config_sha256: str


@with_config(LENIENT)
class SummaryEntry(TypedDict, total=False):
    mean: float
    std: float
    worst_tenth: float


@with_config(LENIENT)
class TestedRound(TypedDict, total=False):
    """Of the last round, the selected one, or unseen clients."""

    round: int
    test: dict[str, SummaryEntry]
    clients: Figures
    gap: dict[str, float]


@with_config(LENIENT)
class TrafficEntry(TypedDict, total=False):
    up: int
    down: int
    trips: int


@with_config(LENIENT)
class ResultsFile(TypedDict, total=False):
    """results.json of a finished run."""

    metric: str
    higher_is_better: bool
    last: TestedRound
    selected: TestedRound
    unseen: TestedRound
    traffic: TrafficEntry
    seconds: float
    lines: int
    faults: int
    abandoned: int


@with_config(LENIENT)
class PartEntry(TypedDict):
    """Some of the tensors of an entry, in a file of another one."""

    folder: str
    file: str
    sha256: str
    names: list[str]


@with_config(LENIENT)
class TensorsEntry(TypedDict):
    """An entry of an index: a file of tensors."""

    file: str  # "": all is in its parts
    sha256: str
    tree: Any
    row: NotRequired[int]  # of a file that holds several trees stacked
    parts: NotRequired[list[PartEntry]]


@with_config(LENIENT)
class ManifestFile(TypedDict, total=False):
    """checkpoint/manifest.json."""

    round: int
    seconds: float
    metrics_length: int
    trees: dict[str, TensorsEntry]


ABOUT_FORM, RESULTS_FORM, MANIFEST_FORM = TypeAdapter(AboutFile), TypeAdapter(ResultsFile), TypeAdapter(ManifestFile)
INDEX_FORM = TypeAdapter(dict[str, TensorsEntry])


def _validate(content: Any, form: TypeAdapter[Any], path: Path) -> Any:
    """The content unchanged; another form than that of a run's file is a `RunError`."""
    try:
        form.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise RunError(f"{path}: {where}: {first['msg']}; this is no file of a run", code="run.damaged") from None
    return content


def round_line(record: dict[str, Any]) -> bytes:
    """A round as a line of the file."""
    text = json.dumps(record)
    return f'{text[:-1]}, "{CHECK}": "{_line_digest(text)}"}}\n'.encode()


def read_rounds(path: Path, *, are_checked: bool) -> list[dict[str, Any]]:
    """All whole lines; a last one cut short by a killed process is none. Changed ones are a `RunError`."""
    try:
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    return [parse_round(line, are_checked=are_checked, where=f"{path}: line {i}") for i, line in enumerate(whole, 1)]


def check_length(path: Path, length: int) -> None:
    """At the checkpoint the file had this length, and ended with a line."""
    content = path.read_bytes()[:length] if path.exists() else b""
    if len(content) < length or not content.endswith(b"\n" if length else b""):
        raise RunError(f"{path}: shorter than at the checkpoint; it was changed since it was written")


def parse_round(line: bytes, *, are_checked: bool, where: str) -> dict[str, Any]:
    """A round, without its checksum; older runs have none."""
    try:
        record = json.loads(line)
        check = record.pop(CHECK, None)
    except (ValueError, RecursionError, AttributeError, TypeError):
        raise RunError(f"{where}: damaged; it is not the JSON that was written") from None
    if (are_checked or check is not None) and check != _line_digest(json.dumps(record)):
        raise RunError(f"{where}: changed since it was written (checksum differs)")
    return dict(_printable_tree(record)) if ESCAPES.search(line) else dict(record)


def _printable_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _printable_tree(held) for key, held in value.items()}
    return [_printable_tree(held) for held in value] if isinstance(value, list) else printable(value)


def _line_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        """The folder of an existing run; a folder without one is a `RunError`."""
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
        about: dict[str, Any] = _validate(read_json(path), ABOUT_FORM, path)
        if "train_samples" in about and len(about["train_samples"]) != len(about["clients"]):
            raise RunError(f"{path}: as many train_samples as clients are needed", code="run.damaged")
        return about

    @property
    def results(self) -> dict[str, Any] | None:
        """The results, or None while the run is not finished."""
        path = self.path / RESULTS
        return _validate(read_json(path), RESULTS_FORM, path) if path.exists() else None

    @property
    def preparation(self) -> Preparation | None:
        """How a table is prepared for the run's models; None if the run does not read tables, or is an old one."""
        path = self.path / PREPARATION
        return Preparation.model_validate(read_json(path)) if path.exists() else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock on this folder, until the process ends; a `RetryableError` if another process holds it."""
        with hold(self.path, "run"):
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
        """Remove what was left by a process killed between manifest and clean-up; needs the lock."""
        if (manifest := self._manifest()) is not None:
            self._drop_stale(manifest["trees"])

    def _drop_stale(self, entries: dict[str, Any]) -> None:
        keep = {entry["file"] for entry in entries.values()}
        for file in (self.path / CHECKPOINT).glob("*.safetensors*"):
            if file.name not in keep:
                file.unlink(missing_ok=True)

    def _manifest(self) -> dict[str, Any] | None:
        path = self.path / CHECKPOINT / "manifest.json"
        return _validate(read_json(path), MANIFEST_FORM, path) if path.exists() else None

    def append_metrics(self, line: dict[str, Any]) -> int:
        """Add a round; returns the length of the file, by which a checkpoint knows how much of it counts."""
        with (self.path / METRICS).open("ab") as file:
            file.write(round_line(line))
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
        lines = read_rounds(path, are_checked=about.get("checked_lines") is True)
        if results is not None and len(lines) != results.get("lines", len(lines)):
            raise RunError(f"{path}: has {len(lines)} rounds; when the run ended it had {results['lines']}")
        return [_as_recorded(line, path) for line in lines]

    @contextmanager
    def personal_models(self, kind: str, known: KnownTensors | None = None) -> Iterator[Callable[[str, Tree], None]]:
        """Keeps personal models, one file each as they come, and in the end an index with checksums.

        With `known`, tensors that are in files already are not written again. Of many clients small models share files.
        """
        known = known or KnownTensors()
        folder, clients = self.path / "personal" / kind, self.about["clients"]
        index: dict[str, Any] = {}
        number = {client: i for i, client in enumerate(clients)}
        waiting: dict[str, Tree] = {}

        def write_waiting() -> None:
            if not waiting:
                return
            first = next(iter(waiting))
            stack = tree_map(lambda *rows: torch.stack(rows), *waiting.values())
            entry = known.write(folder / f"{number.get(first, len(index)):05d}-and-others.safetensors", stack)
            index.update({client: entry | {"row": row} for row, client in enumerate(waiting)})
            waiting.clear()

        def keep(client: str, model: Tree) -> None:
            size = sum(leaf.nbytes for leaf in leaves(model))
            if len(clients) <= MANY or not 0 < size <= SMALL:
                file = f"{number.get(client, len(index)):05d}-{_file_name(client)}.safetensors"
                index[client] = known.write(folder / file, model)
                return
            if waiting and schema(model) != schema(next(iter(waiting.values()))):
                write_waiting()
            waiting[client] = model
            if len(waiting) * size >= TOGETHER:
                write_waiting()

        yield keep
        write_waiting()
        if index:  # a site of its own keeps its model itself
            write_json(folder / "index.json", {c: index[c] for c in [*clients, *index] if c in index})

    def personal(self, client: str, kind: str = "selected") -> Tree:
        """The personal model of a client, of the validation-selected round or the last one."""
        return PersonalModels(self.path, kind).of(client)

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
        return read_tree(folder := self.path / "newcomers" / name, read_json(folder / "index.json")[name])

    def fingerprint(self) -> str:
        """sha256 over all tensors of the run: server, private states, personal models.

        Which file holds a tensor that several models share depends on who was evaluated first, and does not count.
        """
        tensors: dict[str, Tensor] = {}
        for path in self.path.glob(f"{CHECKPOINT}/*.safetensors"):
            tensors |= {f"{path.relative_to(self.path)}:{name}": value for name, value in load_file(path).items()}
        for path in self.path.glob("personal/*/index.json"):
            models = PersonalModels(self.path, path.parent.name)
            for client in models.index:
                tensors |= {f"{path.parent.name}:{client}:{name}": value for name, value in items(models.of(client))}
        digest = hashlib.sha256()
        for name, value in sorted(tensors.items()):
            digest.update(f"{name}:{list(value.shape)}:{value.dtype}".encode())
            digest.update(value.numpy().tobytes())
        return digest.hexdigest()


class PersonalModels:
    """The personal models of a run; the index is read once, and a file of several models too."""

    def __init__(self, run: Path, kind: str) -> None:
        self.run, self.folder = run, run / "personal" / kind
        self.index: dict[str, Any] = _validate(
            read_json(self.folder / "index.json"), INDEX_FORM, self.folder / "index.json"
        )
        self._stack: tuple[str, Tree] = ("", None)

    def of(self, client: str) -> Tree:
        """The model of a client."""
        if client not in self.index:
            raise RunError(f'{self.run}: no client "{client}"; {nearest(client, self.index)}')
        entry = self.index[client]
        if "row" not in entry:
            return read_tree(self.folder, entry)
        place = json.dumps([entry["file"], entry["sha256"], entry.get("parts")])
        if self._stack[0] != place:
            self._stack = place, read_tree(self.folder, entry)
        row, rows = entry["row"], min(len(v) if v.dim() else 0 for v in leaves(self._stack[1]))
        if not 0 <= row < rows:
            raise RunError(f"{self.folder}: the index names model {row} of {rows} in a file", code="run.damaged")
        return tree_map(lambda v: v[row].clone(), self._stack[1])  # aligned, or kernels may round otherwise


@contextmanager
def hold(path: Path, what: str) -> Iterator[None]:
    """Hold the lock on a folder, until the process ends; a `RetryableError` if another process holds it."""
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path / LOCK).acquire(blocking=False))
        except Timeout:
            owner = _lock_owner(path / LOCK)
            raise RetryableError(f"{path}: another process is working on this {what}{owner}") from None
        with suppress(OSError):
            (path / LOCK).write_text(json.dumps(_lock_entry()), encoding="utf-8")
        yield


def _lock_entry() -> dict[str, Any]:
    """Who holds the lock, for people."""
    user = "somebody"
    with suppress(KeyError, OSError, ImportError):  # a container may have no name for it
        user = getpass.getuser()
    return {"process": os.getpid(), "user": user, "host": platform.node(), "since": time.time()}


def _lock_owner(file: Path) -> str:
    """Who holds the lock and for how long, in words; nothing if the file does not say."""
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        minutes = max(0.0, time.time() - float(entry["since"])) / 60
        age = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
        return f" (process {int(entry['process'])} of {entry['user']} on {entry['host']}, for {age})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


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


def part_of(folder: Path, name: Any) -> Path:
    """A folder in another one, by the name that a file gives; a way out of it is a `RunError`."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise RunError(f"{folder}: names {name!r}, which is no folder in it")
    return folder / name


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
