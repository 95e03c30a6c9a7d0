"""One name for one thing: no public class name and no file name occurs twice in the library."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.docs.pages import ROOT

FILES = sorted((ROOT / "src/fedtailor").rglob("*.py"))


def twice(names: list[str]) -> set[str]:
    return {name for name, times in Counter(names).items() if times > 1}


def classes(file: Path) -> list[str]:
    """Public classes, also those in functions and classes."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def test_no_public_class_name_occurs_twice() -> None:
    assert len(FILES) > 100
    assert not twice([name for file in FILES for name in classes(file)])


def test_no_file_name_occurs_twice() -> None:
    assert twice([file.name for file in FILES]) == {"__init__.py"}
