"""The user's own code ("module:Class") behind a run: which of it a file may name, and whether it has changed since.

Trust. A user's own command (`run`, `compare`, `fit`, a program) may name any "module:Class", which is remembered: the
name, the file and a hash over it and all that it imports out of its folder. What a run folder or an exported model
names is imported only if that very code was remembered before, or is accepted by `--trust`: what a file says is never
reason enough to run it. The user's configuration folder has one small file for each.

Change. A run does not go on with other code than it began with; predictions and exports only note it, as they need no
more than the class and the names and shapes of its parameters. The files of an algorithm or model
and of the modules that it imports are compared if they are in the folder from which the first was imported; of
an installed package only the first file. A class of a notebook has no file: its methods and fields are compared, if
they can be read. Other packages are not looked at, nor fedtailor itself, whose version is recorded.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedtailor import algorithms, models
from fedtailor.core import task as tasks
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import sampling
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import CONFIG, RunFolder
from fedtailor.plugins import SEARCHED, file_of, folder_above, import_folder, import_object, locate_file, module_of
from fedtailor.training import optimizers

T = TypeVar("T")
PLAIN = (bool, int, float, str, tuple, list)
Wanted = Callable[[str], bool]  # of a key that names code
Code = dict[str, dict[str, Any]]  # by the key that names it: its "name", its "folder", and "files" with their digests

_remembered = set[str]()  # by this process, which may have no folder to write to


def names(config: RunConfig) -> dict[str, str]:
    """What a configuration names as "module:Class", by key."""
    named = {
        "algorithm.name": config.algorithm.name,
        "model.name": config.model.name,
        "local.optimizer": config.local.optimizer,
        "task.name": config.task.name,
        "task.criterion": str(config.task.options.get("criterion", "")),
        "data.source": getattr(config.data, "load", ""),
        "federation.sampler": config.federation.sampler,
    }
    named |= {f"local.parts.{k}.optimizer": part.optimizer or "" for k, part in (config.local.parts or {}).items()}
    named |= {
        f"model.by_client.{k}.name": str(own.get("name", "")) for k, own in (config.model.by_client or {}).items()
    }
    named |= {
        f"evaluation.metrics.{i}": name for i, name in enumerate([*config.evaluation.metrics, config.evaluation.decide])
    }
    return {key: name for key, name in named.items() if ":" in name}


def remember(config: RunConfig) -> None:
    """Trust what the user's own command names, so that the files it writes may name it.

    A file of the user's own may be edited afterwards and still serve; one that was accepted by `--trust` may not.
    """
    for key, name in names(config).items():
        if (file := locate_file(key, name)) is not None:
            _remember(name, file)
            _write_entry(*_entry_of_place(name, file))


def require_trusted(
    config: RunConfig, origin: str, *, may_be_edited: bool = False, is_wanted: Wanted = lambda key: True
) -> None:
    """Fail if a configuration that was read from a file names code that this user neither ran nor accepted."""
    for key, name in names(config).items():
        if not is_wanted(key):
            continue
        file = locate_file(key, name)
        if file is None:
            raise RunError(f'{origin}: {key} "{name}": has no source file to look at, so no file may name it')
        if not (_is_remembered(_entry(name, file)) or (may_be_edited and _is_remembered(_entry_of_place(name, file)))):
            raise RunError(
                f'{origin}: {key} "{name}" is code outside fedtailor that you have not run yourself: {file} '
                f"(sha256 {fingerprint(name, file)[:16]}); nothing of it was run. "
                "Read it, and if you trust it add --trust (in Python: trust=True)"
            )


def accept(config: RunConfig, origin: str, tell: Callable[[str], None]) -> None:
    """Trust what a file names: report each file with its hash, and refuse classes of another kind."""
    for key, name in names(config).items():
        file = locate_file(key, name)
        if file is not None:  # else `require_trusted` says so
            tell(f'{origin}: trusted: {key} "{name}", {file}, sha256 {fingerprint(name, file)}')
            find = {"algorithm.name": algorithms.find, "model.name": models.find, "local.optimizer": optimizers.find}
            find |= {"task.name": tasks.find, "federation.sampler": sampling.find}
            is_model = key == "model.name" or key.startswith("model.by_client.")
            kind = find.get(key, partial(import_object, key))(name)
            if is_model and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise ConfigError(f'{origin}: {key} "{name}": is no nn.Module, and is not called for a file')
            _remember(name, file)


def accept_folder(path: Path, tell: Callable[[str], None] | None = None) -> None:
    """`accept` for a run, or for all runs of a fit."""
    for run in [path] if (path / CONFIG).exists() else sorted(p.parent for p in path.glob(f"*/{CONFIG}")):
        accept(RunFolder.open(run).config, str(run), tell or say)


def say(line: str) -> None:
    print(line, file=sys.stderr)


def fingerprint(name: str, file: Path) -> str:
    """sha256 over the file of a module, its packages, and all that they import out of the same folder."""
    folder, parts = folder_of(name, file), name.partition(":")[0].split(".")
    packages = (folder.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts)))
    digest = hashlib.sha256()
    for path, content in sources(folder, [file, *filter(Path.is_file, packages)]).items():
        digest.update(f"{path}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def folder_of(name: str, file: Path) -> Path:
    return folder_above(file, name.partition(":")[0]) or file.parent


def sources(folder: Path, first: Sequence[Path]) -> dict[str, bytes]:
    """The first files and all that they need of a folder; of an installed package only the first."""
    is_installed = folder in {Path(path).resolve() for path in sysconfig.get_paths().values()}
    waiting, contents = list(first), {}
    while waiting:
        file = waiting.pop()
        name = file.relative_to(folder).as_posix()
        if name not in contents:
            contents[name] = file.read_bytes()
            waiting += [] if is_installed or file.suffix != ".py" else _imports(contents[name], file, folder)
    return dict(sorted(contents.items()))


def _imports(content: bytes, file: Path, folder: Path) -> Iterator[Path]:
    """Files of a folder that the import statements of another one name."""
    package = file.relative_to(folder).parts[:-1]
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it cannot be imported either
        return
    for node in nodes:
        parts_of: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            parts_of = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            parts_of = [(*base, alias.name) for alias in node.names]  # a module of a package, or a thing of a module
        for parts in {name[:end] for name in parts_of for end in range(1, len(name) + 1)}:
            path = folder.joinpath(*parts)
            if parts[0] != "fedtailor":
                yield from (p for p in (path.with_name(f"{path.name}.py"), path / "__init__.py") if p.is_file())


def _store() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fedtailor" / "trusted"


def _entry(name: str, file: Path) -> tuple[str, str]:
    content = json.dumps({"name": name, "file": str(file), "sha256": fingerprint(name, file)}, indent=1)
    return content, hashlib.sha256(content.encode()).hexdigest()


def _entry_of_place(name: str, file: Path) -> tuple[str, str]:
    """As `_entry`, whatever is in the file."""
    content = json.dumps({"name": name, "file": str(file)}, indent=1)
    return content, hashlib.sha256(content.encode()).hexdigest()


def _remember(name: str, file: Path) -> None:
    _write_entry(*_entry(name, file))


def _write_entry(content: str, key: str) -> None:
    _remembered.add(key)
    with suppress(OSError, RuntimeError):  # without a home it is remembered by this process only
        if not (path := _store() / f"{key}.json").exists():
            _store().mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(content, encoding="utf-8")


def _is_remembered(entry: tuple[str, str]) -> bool:
    key = entry[1]
    try:
        return key in _remembered or (_store() / f"{key}.json").is_file()
    except (OSError, RuntimeError):
        return False


def code_of(config: RunConfig, is_wanted: Wanted = lambda key: True) -> Code:
    """The user code that a configuration names; it is imported."""
    find: dict[str, Callable[[str], Any]] = {
        "algorithm.name": algorithms.find,
        "model.name": models.find,
        "local.optimizer": optimizers.find,
    }
    chosen = {"algorithm.name": config.algorithm.name, "model.name": config.model.name}
    chosen |= {"local.optimizer": config.local.optimizer} | names(config)
    wanted = {key: name for key, name in chosen.items() if is_wanted(key)}
    named = {key: (name, find.get(key, partial(import_object, key))(name)) for key, name in wanted.items()}
    recorded = {key: _record_of(name, models.source_of(kind)) for key, (name, kind) in named.items()}
    return {key: own for key, own in recorded.items() if own is not None}


def named_code(config: RunConfig) -> Code:
    """What a configuration names as "module:Class", by its files alone: nothing is imported."""
    code: Code = {}
    for key, name in names(config).items():
        if not name.startswith("fedtailor.") and (file := locate_file(key, name)) is not None:
            folder = folder_of(name, file)
            code[key] = {"name": name, "folder": str(folder), "files": _files(folder, file)}
    return code


def code_notes(code: Code) -> list[str]:
    """Notes on code whose source cannot be read."""
    return [
        f"{key}: the source of {its['name']} cannot be read; changes to it go unnoticed"
        for key, its in code.items()
        if its["files"] is None
    ]


def refuse_other_code(folder: RunFolder) -> None:
    """Fail if the user code of a run has changed or is not trusted; none of it has been run at this point."""
    if change := change_of(folder):
        why = f"{change} since the run was started; put back what it was, or start a new run"
        raise RunError(f"{folder.path}: {why}", code="run.changed")


def other_code(folder: RunFolder) -> list[str]:
    """Notes on how the code of a run's algorithm and model has changed; it must be trusted, to be used."""
    return _found(folder, serving_notes)


def serving_notes(before: Any, config: RunConfig, origin: str) -> list[str]:
    """As `other_code`, for the code that a file recorded."""
    if before is not None and not _is_code(before):
        raise RunError(f"{origin}: what it says of its code is damaged")
    require_trusted(config, origin, may_be_edited=True, is_wanted=_serves)
    if before is None:
        return []
    own = {k: its for k, its in before.items() if _serves(k)}
    now = code_of(config, _serves)
    change = code_difference(own, now)
    if change and own.keys() != now.keys():  # another kind of code, not another text
        raise RunError(f"{origin}: {change}", code="run.changed")
    return [f"{origin}: {change} since the run was started"] if change else []


def _serves(key: str) -> bool:
    """Whether a prediction needs the code of a key."""
    return key in ("algorithm.name", "model.name") or key.startswith("model.by_client.")


def change_of(folder: RunFolder) -> str:
    """How user code has changed since a run, in words; empty if it has not, or if an old folder has no record of it.

    Missing code is a `RunError`.
    """
    return _found(folder, change_since)


def _found(folder: RunFolder, look: Callable[[Any, RunConfig, str], T]) -> T:
    """What `look` says of the code that a run recorded; where code is missing, with the place where it was."""
    before = folder.about.get("code")
    try:
        return look(before, folder.config, str(folder.path))
    except ConfigError as error:
        where = _where_to_find(str(error), before or {})
        raise RunError(f"{folder.path}: {str(error).removesuffix(SEARCHED) if where else error}{where}") from None


def change_since(before: Any, config: RunConfig, origin: str) -> str:
    """`change_of` for the code that a file recorded. Nothing is imported unless it is trusted."""
    if before is not None and not _is_code(before):
        raise RunError(f"{origin}: what it says of its code is damaged")
    if before is not None and (change := code_difference(before, before | named_code(config))):
        return change
    require_trusted(config, origin)
    return "" if before is None else code_difference(before, code_of(config))


def _is_code(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(its, dict)
        and isinstance(its.get("name"), str)
        and isinstance(its.get("folder"), str | None)
        and isinstance(its.get("files", 0), dict | None)
        for its in value.values()
    )


def code_difference(before: Code, now: Code) -> str:
    """The first difference in words, or nothing; source that could not be read is not compared."""
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old is None or new is None:
            words = (
                "was part of fedtailor and is now your own"
                if old is None
                else "was your own and is now part of fedtailor"
            )
            return f"{key} {(old or new or {})['name']} {words}"
        if None in (old["files"], new["files"]) or old["files"] == new["files"]:
            continue
        names = sorted({**old["files"], **new["files"]})
        changed = [name for name in names if old["files"].get(name) != new["files"].get(name)]
        return f"the code of {key} {new['name']} changed ({', '.join(changed)})"
    return ""


def _where_to_find(error: str, before: Code) -> str:
    """Where user code that is not found may be."""
    for key, its in before.items():
        if error.startswith(f"{key}:"):
            if ":" in its["name"] and its["folder"]:
                return f"; it was in {its['folder']}: go there, or set PYTHONPATH={shlex.quote(its['folder'])}"
            return (
                f"; it was a class of the program that began the run (in {its['folder'] or 'a console or notebook'}): "
                f"call fedtailor.{'models' if key.startswith('model') else 'algorithms'}.register with it and then "
                "fedtailor.experiments.runner.resume, or put it "
                "into a file and start a new run, which any process can go on with"
            )
    return ""


def _record_of(name: str, kind: Any) -> dict[str, Any] | None:
    """The record of a class or function; None if it is part of fedtailor."""
    module = module_of(name, kind)
    if str(getattr(module, "__name__", "")).partition(".")[0] == "fedtailor":
        return None
    file = file_of(module)
    if file is None:
        return {"name": name, "folder": None, "files": _digest_without_file(kind)}
    folder = import_folder(module) or file.parent
    return {"name": name, "folder": str(folder), "files": _files(folder, file)}


def _files(folder: Path, first: Path) -> dict[str, str]:
    return {name: _digest(content) for name, content in sources(folder, [first]).items()}


def _digest_without_file(kind: Any) -> dict[str, str] | None:
    """Digest of the methods and fields of a class without a file; None if its source cannot be read."""
    fields = getattr(kind, "__dataclass_fields__", {})
    text = [f"{name} = {field.default}" for name, field in fields.items() if isinstance(field.default, PLAIN)]
    generated = ("<string>", dataclasses.__file__)
    methods = [v for v in vars(kind).values() if inspect.isfunction(v) and v.__code__.co_filename not in generated]
    try:
        text += [inspect.getsource(method) for method in methods]
    except (OSError, TypeError):
        return None
    return {kind.__qualname__: _digest("\n".join(text).encode())} if methods else None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
