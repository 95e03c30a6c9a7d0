"""Rules of the source tree that no linter knows: python tools/structure.py src/fedtailor

- no file above 350 lines;
- no class with more than 10 fields, but for options that people set (algorithms and sections of a configuration)
  and the layers of a network;
- no six identical lines in two places;
- algorithms do not reach through `fed.engine`;
- tensors are made on the device of others, `like.new_zeros(...)`, or say which, `torch.zeros(..., device=...)`; but
  for the loading of data, which begins on the host.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_LINES, MOST_FIELDS, REPEATED = 350, 10, 6
EXEMPT = {"Algorithm", "Section", "OpenSection", "SourceConfig", "Module"}  # by their own bases, however far up
KNOWN = {"FederatedData"}  # has eleven fields
MAKES = {
    "zeros",
    "ones",
    "full",
    "empty",
    "tensor",
    "as_tensor",
    "arange",
    "eye",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
}
ON_HOST = ("data", "testing", "tables", "serving")  # packages that load data, or serve it, on the host


def main(root: Path) -> int:
    """Print what is wrong; how many things are."""
    paths = sorted(root.rglob("*.py"))
    exempt = with_subclasses(EXEMPT, paths)
    problems = [problem for path in paths for problem in of_file(path, root, exempt)]
    problems += repeated(paths)
    for problem in problems:
        print(problem)
    print(f"structure: {len(problems)} problems in {root}")
    return len(problems)


def of_file(path: Path, root: Path, exempt: set[str]) -> Iterator[str]:
    """The rules for a single file."""
    text = path.read_text(encoding="utf-8")
    if (lines := text.count("\n")) > MOST_LINES:
        yield f"{path}: {lines} lines, more than {MOST_LINES}; split it"
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.ClassDef)
            and node.name not in exempt | KNOWN
            and len(fields := fields_of(node)) > MOST_FIELDS
        ):
            yield f"{path}:{node.lineno}: {node.name} has {len(fields)} fields, more than {MOST_FIELDS}"
        if isinstance(node, ast.Attribute) and node.attr == "engine" and path.is_relative_to(root / "algorithms"):
            yield f"{path}:{node.lineno}: an algorithm reaches for an engine; what it needs is public on `fed`"
        if is_bare(node) and path.relative_to(root).parts[0] not in ON_HOST:
            yield f"{path}:{node.lineno}: a tensor is made without a device; take it from an input: v.new_zeros(...)"


def is_bare(node: ast.AST) -> bool:
    """Whether a tensor is made without a word on where: on the CPU, wherever its neighbours are."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKES) == ("torch", True)
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    )


def fields_of(node: ast.ClassDef) -> set[str]:
    """Annotated names of the class body and attributes that __init__ sets."""
    names = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign)
        and isinstance(part.target, ast.Name)
        and "ClassVar" not in ast.dump(part.annotation)
    }
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            names |= {
                inner.attr
                for inner in ast.walk(part)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            }
    return names


def with_subclasses(names: set[str], paths: list[Path]) -> set[str]:
    """The names of classes and of all that derive from them."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    known = set(names)
    while more := {name for name, its in bases.items() if its & known} - known:
        known |= more
    return known


def repeated(paths: list[Path]) -> Iterator[str]:
    """Runs of identical lines that stand in two places; imports, decorators and lone punctuation do not count."""
    seen: dict[tuple[str, ...], tuple[Path, int]] = {}
    reported: set[tuple[Path, Path]] = set()
    for path in paths:
        kept = [(i, line.strip()) for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)]
        kept = [
            (i, line) for i, line in kept if len(line) > 3 and not line.startswith(("from ", "import ", "#", '"""'))
        ]
        for start in range(len(kept) - REPEATED + 1):
            window = tuple(line for _, line in kept[start : start + REPEATED])
            first = seen.setdefault(window, (path, kept[start][0]))
            is_apart = first[0] != path or kept[start][0] - first[1] >= REPEATED
            if first != (path, kept[start][0]) and is_apart and (first[0], path) not in reported:
                reported.add((first[0], path))
                yield f"{path}:{kept[start][0]}: {REPEATED} lines as at {first[0]}:{first[1]}"


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1])), 1))
