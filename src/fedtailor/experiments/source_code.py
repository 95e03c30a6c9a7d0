"""The user's own code behind a run, so that a run does not go on, and is not used, with other code than it began with.

Looked at are the file of an own algorithm or model and those of the modules that it imports, one through the other, by
import statements and out of the same top folder: the one from which the first was imported. Of an installed package
only the first file is. A class of a notebook has no file; its methods and fields are looked at instead, where they can
be had. Not looked at are other packages, and fedtailor itself, whose version is recorded beside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import shlex
from pathlib import Path
from typing import Any

from fedtailor import algorithms, models
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import trust
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import RunFolder
from fedtailor.plugins import SEARCHED, file_of, import_folder, imported, located, module_of
from fedtailor.training import optimizers

PLAIN = (bool, int, float, str, tuple, list)
Code = dict[str, dict[str, Any]]  # by the key that names it: its "name", its "folder", and "files" with their digests


def code_of(config: RunConfig) -> Code:
    """What a configuration names that is not of this package."""
    named = {
        "algorithm.name": (config.algorithm.name, algorithms.find(config.algorithm.name)),
        "model.name": (config.model.name, models.find(config.model.name)),
        "local.optimizer": (config.local.optimizer, optimizers.find(config.local.optimizer)),
    }
    others = {k: v for k, v in trust.names(config).items() if k not in named}
    named |= {key: (name, imported(key, name)) for key, name in others.items()}
    return {key: own for key, (name, kind) in named.items() if (own := _source(name, kind)) is not None}


def named_code(config: RunConfig) -> Code:
    """What a configuration names as "module:Class", by its files alone: nothing is imported."""
    code: Code = {}
    for key, name in trust.names(config).items():
        if not name.startswith("fedtailor.") and (file := located(key, name)) is not None:
            folder = trust.folder_of(name, file)
            code[key] = {"name": name, "folder": str(folder), "files": _files(folder, file)}
    return code


def notes(code: Code) -> list[str]:
    """What cannot be looked after."""
    return [
        f"{key}: the source of {its['name']} cannot be had; a change of it goes unnoticed"
        for key, its in code.items()
        if its["files"] is None
    ]


def refuse_other_code(folder: RunFolder) -> None:
    """Fail if own code of a run is not what it was then, or is not trusted; nothing of it was run until here."""
    if change := changed_code(folder):
        why = f"{change} since the run was started; put back what it was, or start a new run"
        raise RunError(f"{folder.path}: {why}", code="run.changed")


def changed_code(folder: RunFolder) -> str:
    """In words, what own code of a run is not what it was then; nothing of older folders, which do not tell.

    Code that is not there is a `RunError`.
    """
    before = folder.about.get("code")
    try:
        return changed_since(before, folder.config, str(folder.path))
    except ConfigError as error:
        where = _whereabouts(str(error), before or {})
        raise RunError(f"{folder.path}: {str(error).removesuffix(SEARCHED) if where else error}{where}") from None


def changed_since(before: Any, config: RunConfig, origin: str) -> str:
    """The same for what a file recorded. First by the files alone; what is not trusted is not imported to find out."""
    if before is not None and not _is_code(before):
        raise RunError(f"{origin}: what it says of its code is damaged")
    if before is not None and (change := difference(before, before | named_code(config))):
        return change
    trust.require(config, origin)
    return "" if before is None else difference(before, code_of(config))


def _is_code(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(its, dict)
        and isinstance(its.get("name"), str)
        and isinstance(its.get("folder"), str | None)
        and isinstance(its.get("files", 0), dict | None)
        for its in value.values()
    )


def difference(before: Code, now: Code) -> str:
    """What changed, in words, or nothing; where the source could not be had nothing is known."""
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if old is None or new is None:
            words = "was fedtailor's and is one's own" if old is None else "was one's own and is fedtailor's"
            return f"{key} {(old or new or {})['name']} {words}"
        if None in (old["files"], new["files"]) or old["files"] == new["files"]:
            continue
        names = sorted({**old["files"], **new["files"]})
        changed = [name for name in names if old["files"].get(name) != new["files"].get(name)]
        return f"the code of {key} {new['name']} changed ({', '.join(changed)})"
    return ""


def _whereabouts(error: str, before: Code) -> str:
    """What to do about own code that is not found."""
    for key, its in before.items():
        if error.startswith(f"{key}:"):
            if ":" in its["name"] and its["folder"]:
                return f"; it was in {its['folder']}: go there, or set PYTHONPATH={shlex.quote(its['folder'])}"
            return (
                f"; it was a class of the program that began the run (in {its['folder'] or 'a console or notebook'}): "
                "call fedtailor.algorithms.register with it and then fedtailor.experiments.runner.resume, or put it "
                "into a file and start a new run, which any process can go on with"
            )
    return ""


def _source(name: str, kind: Any) -> dict[str, Any] | None:
    """What is recorded of a class or function; None if it is of this package."""
    module = module_of(name, kind)
    if str(getattr(module, "__name__", "")).partition(".")[0] == "fedtailor":
        return None
    file = file_of(module)
    if file is None:
        return {"name": name, "folder": None, "files": _typed(kind)}
    folder = import_folder(module) or file.parent
    return {"name": name, "folder": str(folder), "files": _files(folder, file)}


def _files(folder: Path, first: Path) -> dict[str, str]:
    """The first file and all that it needs of a folder."""
    return {name: _digest(content) for name, content in trust.sources(folder, [first]).items()}


def _typed(kind: Any) -> dict[str, str] | None:
    """Of a class without a file: what was typed for its methods, and its fields; None where that cannot be had."""
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
