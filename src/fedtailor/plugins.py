"""Code of users, named "package.module:Class" wherever a name of fedtailor is allowed."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from fedtailor.errors import ConfigError

MAIN = ("__main__", "__mp_main__")  # the program itself, and that program in a process it has started
_importing: ContextVar[str] = ContextVar("importing", default="")


def import_object(key: str, name: str) -> Any:
    """The object that `name` stands for; modules in the current folder are found too."""
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()  # a file may have been written a moment ago
    before = _importing.set(module)
    try:
        found = _program() if module == _program_name() else importlib.import_module(module)
        _refuse_namesake(key, name, found)
        return getattr(found, attribute)
    except ModuleNotFoundError as error:
        raise _not_found(key, name, str(error.name)) from None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'{key}: cannot import "{name}": {error}{_where(module)}') from None
    finally:
        _importing.reset(before)


def _refuse_namesake(key: str, name: str, found: ModuleType | None) -> None:
    """Fail where a module of Python or of a package hides the file in the current folder that is meant."""
    module = name.partition(":")[0]
    own = Path.cwd() / f"{module}.py"
    if "." in module or not own.is_file() or (file := file_of(found)) == own.resolve():
        return
    other = file or "a module that is part of Python"
    raise ConfigError(f'{key}: "{name}": "{module}" is {other}, which hides {own}; give your file another name')


def _where(module: str) -> str:
    """The file of a module that was imported, for an error about what is in it."""
    file = file_of(sys.modules.get(module))
    return "" if file is None else f" ({file})"


SEARCHED = "; start from the folder that holds it, or add that to PYTHONPATH"


def _not_found(key: str, name: str, module: str) -> ConfigError:
    hint = SEARCHED if name.partition(":")[0].startswith(module) else f"; install {module}"
    return ConfigError(f"{key}: cannot import \"{name}\": No module named '{module}'{hint}")


def locate_file(key: str, name: str) -> Path | None:
    """The file that `import_object` would run for a name, found without running it; None if it has no file."""
    importlib.invalidate_caches()
    module = name.partition(":")[0]
    loaded = _program() if module == _program_name() else sys.modules.get(module)
    if loaded is not None:
        return file_of(loaded)
    spec, folders = None, None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:end]), folders)
        if spec is None:
            raise _not_found(key, name, ".".join(parts[:end]))
        folders = list(spec.submodule_search_locations or [])
    return Path(spec.origin).resolve() if spec and spec.origin and Path(spec.origin).is_file() else None


def _spec(module: str, folders: list[str] | None) -> ModuleSpec | None:
    """The spec of a module of these folders; of the current folder, which Python searches last, too."""
    for finder in sys.meta_path:
        if (spec := finder.find_spec(module, folders)) is not None:
            return spec
    return PathFinder.find_spec(module, [str(Path.cwd())]) if folders is None else None


def name_of(kind: Any) -> str | None:
    """The name by which another process can import it; None if defined in a console, a notebook or a function."""
    module = sys.modules.get(kind.__module__)
    name, own = _name(module), kind.__qualname__
    if name is None or import_folder(module) is None or getattr(module, own, None) is not kind:
        return None
    return f"{name}:{own}"


def by_name(value: Any, key: str) -> Any:
    """A setting with classes and functions replaced by their names, by which any process finds them again."""
    if isinstance(value, list | tuple):
        return [by_name(part, key) for part in value]
    if isinstance(value, Mapping):
        return {k: by_name(part, key) for k, part in value.items()}
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return value
    if (name := name_of(value)) is None:
        raise ConfigError(f"{key}: {value.__qualname__} cannot be imported by its name; put it into a file of its own")
    return name


def module_of(name: str, kind: Any) -> ModuleType | None:
    """The module that contains what `name` stands for: "module:Class", or the registered name of a class."""
    module = name.partition(":")[0] if ":" in name else str(getattr(kind, "__module__", ""))
    return _program() if module == _program_name() else sys.modules.get(module)


def file_of(module: ModuleType | None) -> Path | None:
    """The file of a module; None if it has none, as a console and a notebook."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file is not None and Path(file).is_file() else None


def import_folder(module: ModuleType | None) -> Path | None:
    """The folder in which Python finds a module by its name; None if no folder is one."""
    file, name = file_of(module), _name(module)
    return None if file is None or name is None else folder_above(file, name)


def folder_above(file: Path, module: str) -> Path | None:
    """The folder in which Python finds a file by the name of its module; None if the two do not fit."""
    path, parts = file.parent if file.name == "__init__.py" else file.with_suffix(""), tuple(module.split("."))
    return path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else None


def _name(module: ModuleType | None) -> str | None:
    return _program_name() if module is _program() else getattr(module, "__name__", None)


def refuse_while_importing() -> None:
    """Raise `ConfigError` in a file that is only imported for a class: nothing is trained then."""
    if name := _importing.get():
        raise ConfigError(f'{name}: starts a run when it is imported; put that below: if __name__ == "__main__":')


def _program() -> ModuleType | None:
    return sys.modules.get("__main__")


def _program_name() -> str | None:
    """The name of the running program as a module, importing which would run it again; None if it has no file."""
    spec = getattr(_program(), "__spec__", None)
    if spec is not None and spec.name not in MAIN:  # python -m package.module
        return str(spec.name)
    file = file_of(_program())
    return None if file is None else file.stem
