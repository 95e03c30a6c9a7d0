"""Write docs/reference/python.md from the docstrings: python tools/python_reference.py [--check]

docs/reference/python.intro.md has the order and the words between; a line `::: module.object`, with the members to show
below it if not all, stands for an entry. The page can be read in a clone as on the site. --check fails if it is not
what would be written.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
ENTRY = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
SECTIONS = ("Args", "Returns", "Raises")


def main() -> None:
    """Write the page, or compare it."""
    page, text = REFERENCE / "python.md", render()
    if "--check" not in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
    elif page.read_text(encoding="utf-8") != text:
        sys.exit(f"{page}: not what the docstrings say now; python tools/python_reference.py")


def render() -> str:
    """The page of today's docstrings."""
    intro = (REFERENCE / "python.intro.md").read_text(encoding="utf-8")
    return ENTRY.sub(lambda match: "\n".join(entry(match[1], match[2])) + "\n", intro)


def entry(path: str, options: str) -> Iterator[str]:
    """An object with its members."""
    subject = find(path)
    if isinstance(subject, types.ModuleType):
        for name, kind in vars(subject).items():
            if inspect.isclass(kind) and kind.__module__ == path and not name.startswith("_"):
                yield from shown(name, kind, "###")
        return
    yield from shown(path.rpartition(".")[2], subject, "###")
    if inspect.isclass(subject):
        chosen = re.search(r"members: \[(.*)\]", options)
        names = chosen[1].split(", ") if chosen else None
        yield from fields(subject, inherited="inherited_members" in options)
        for name in names or members(subject):
            yield from shown(f"{subject.__name__}.{name}", inspect.getattr_static(subject, name), "####")


def find(path: str) -> Any:
    """A module, or an object of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def members(kind: type) -> list[str]:
    """Public functions and properties that it defines and describes, in the order of the source."""
    made = (types.FunctionType, property, classmethod, staticmethod)
    found = [k for k, v in vars(kind).items() if isinstance(v, made) or hasattr(v, "func")]
    return [k for k in found if not k.startswith("_") and documented(vars(kind)[k])]


def documented(member: Any) -> bool:
    return bool(inspect.getdoc(unwrapped(member)))


def unwrapped(member: Any) -> Any:
    """The function of a method or a property."""
    return next((v for k in ("fget", "func", "__func__") if (v := getattr(member, k, None)) is not None), member)


def fields(kind: type, *, inherited: bool) -> Iterator[str]:
    """The fields of a dataclass or a named tuple, with their defaults."""
    rows = []
    if dataclasses.is_dataclass(kind):
        own = set(vars(kind).get("__annotations__", {}))
        for f in dataclasses.fields(kind):
            if (inherited or f.name in own) and not f.name.startswith("_"):
                default = "" if f.default is dataclasses.MISSING else f" = {f.default!r}"
                rows.append(f"{f.name}: {f.type}{default if len(default) < 40 else ''}")
    elif issubclass(kind, tuple):
        rows = [f"{name}: {hint}" for name, hint in kind.__annotations__.items()]
    if rows:
        yield from ["```python", *rows, "```", ""]


def shown(name: str, subject: Any, level: str) -> Iterator[str]:
    """A heading, the signature and the docstring."""
    of = unwrapped(subject)
    yield f"{level} {name}"
    yield ""
    if callable(of) and not isinstance(subject, property) and not hasattr(subject, "func"):
        called = signature(name.rpartition(".")[2], of)
        if called:
            yield from ["```python", called, "```", ""]
    yield from paragraphs(inspect.getdoc(of) or "")


def signature(name: str, of: Any) -> str:
    """How it is called, over several lines if it is long."""
    if inspect.isclass(of) and "__init__" not in vars(of):
        return ""
    made = inspect.signature(of)
    each = [str(p).replace("'", "") for p in made.parameters.values() if p.name != "self"]
    result = "" if made.return_annotation is made.empty else f" -> {str(made.return_annotation).strip(chr(39))}"
    kinds = [p.kind for p in made.parameters.values() if p.name != "self"]
    for kind, mark in ((inspect.Parameter.KEYWORD_ONLY, "*"), (inspect.Parameter.POSITIONAL_ONLY, "/")):
        if kind in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            at = kinds.index(kind) if mark == "*" else len(kinds) - kinds[::-1].index(kind)
            each.insert(at, mark)
            kinds.insert(at, kind)
    line = f"{name}({', '.join(each)}){result}"
    return line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {one}," for one in each), f"){result}"])


def paragraphs(text: str) -> Iterator[str]:
    """A docstring in the Google style as Markdown."""
    inside = False
    for line in text.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            inside = True
            yield f"**{line.rstrip(':')}**"
            yield ""
        elif inside and re.match(r"    \S", line):
            name, colon, words = line.strip().partition(": ")
            yield f"- `{name}`: {words}" if colon and " " not in name else f"- {line.strip()}"
        elif inside and line.startswith("        "):
            yield f"  {line.strip()}"
        else:
            inside = inside and not line
            yield line
    yield ""


if __name__ == "__main__":
    main()
