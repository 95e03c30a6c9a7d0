"""Which code of one's own a file may name. What a file says is never reason enough to run it.

A user's own command (`run`, `compare`, `fit`, a program) may name any "module:Class", and is remembered: the name, the
file and a hash over it and all that it imports out of its folder. What a run folder or an exported model names is
imported only if that very code was remembered before, or is accepted by `--trust`. Remembered is in the user's own
configuration folder, one small file each.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import nn

from fedtailor import algorithms, models
from fedtailor.core import task as tasks
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import CONFIG, RunFolder
from fedtailor.plugins import folder_above, imported, located
from fedtailor.training import optimizers

_remembered = set[str]()  # by this process, which may have no folder to write to


def names(config: RunConfig) -> dict[str, str]:
    """What a configuration names as "module:Class", by key."""
    named = {
        "algorithm.name": config.algorithm.name,
        "model.name": config.model.name,
        "local.optimizer": config.local.optimizer,
        "task.name": config.task.name,
        "data.source": getattr(config.data, "load", ""),
    }
    named |= {
        f"model.by_client.{k}.name": str(own.get("name", "")) for k, own in (config.model.by_client or {}).items()
    }
    named |= {f"evaluation.metrics.{i}": name for i, name in enumerate(metric_names(config))}
    return {key: name for key, name in named.items() if ":" in name}


def metric_names(config: RunConfig) -> list[str]:
    """Metrics that a configuration names."""
    return [*config.evaluation.metrics, config.evaluation.decide]


def remember(config: RunConfig) -> None:
    """What the user's own command names may be named by the files that it writes."""
    for key, name in names(config).items():
        if (file := located(key, name)) is not None:
            _remember(name, file)


def require(config: RunConfig, origin: str) -> None:
    """Fail if a configuration that was read from a file names code that this user neither ran nor accepted."""
    for key, name in names(config).items():
        file = located(key, name)
        if file is None:
            raise RunError(f'{origin}: {key} "{name}": has no source file to look at, so no file may name it')
        if not _is_remembered(name, file):
            raise RunError(
                f'{origin}: {key} "{name}" is code outside fedtailor that you have not run yourself: {file} '
                f"(sha256 {fingerprint(name, file)[:16]}); nothing of it was run. "
                "Read it, and if you trust it add --trust (in Python: trust=True)"
            )


def accept(config: RunConfig, origin: str, tell: Callable[[str], None]) -> None:
    """The user trusts what a file names: told is which file and hash, and only classes of the right kind are taken."""
    for key, name in names(config).items():
        file = located(key, name)
        if file is not None:  # else `require` says so
            tell(f'{origin}: trusted: {key} "{name}", {file}, sha256 {fingerprint(name, file)}')
            find = {"algorithm.name": algorithms.find, "model.name": models.find, "local.optimizer": optimizers.find}
            find |= {"task.name": tasks.find}
            is_model = key == "model.name" or key.startswith("model.by_client.")
            kind = find.get(key, partial(imported, key))(name)
            if is_model and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise ConfigError(f'{origin}: {key} "{name}": is no nn.Module, and is not called for a file')
            _remember(name, file)


def accept_folder(path: Path, tell: Callable[[str], None] | None = None) -> None:
    """The same for all that a run, or the runs of a fit, name."""
    for run in [path] if (path / CONFIG).exists() else sorted(p.parent for p in path.glob(f"*/{CONFIG}")):
        accept(RunFolder.open(run).config, str(run), tell or say)


def say(line: str) -> None:
    """To the user, beside what a command prints."""
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
    """The folder from which a module is imported."""
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
    """What is remembered, and the name of its file."""
    content = json.dumps({"name": name, "file": str(file), "sha256": fingerprint(name, file)}, indent=1)
    return content, hashlib.sha256(content.encode()).hexdigest()


def _remember(name: str, file: Path) -> None:
    content, key = _entry(name, file)
    _remembered.add(key)
    with suppress(OSError, RuntimeError):  # without a home it is remembered by this process only
        if not (path := _store() / f"{key}.json").exists():
            _store().mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(content, encoding="utf-8")


def _is_remembered(name: str, file: Path) -> bool:
    key = _entry(name, file)[1]
    try:
        return key in _remembered or (_store() / f"{key}.json").is_file()
    except (OSError, RuntimeError):
        return False
