"""Rules of the source tree that no linter knows: python tools/structure.py src/fedtailor

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

REPEATED = 6
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
    problems = [problem for path in paths for problem in of_file(path, root)]
    problems += repeated(paths)
    for problem in problems:
        print(problem)
    print(f"structure: {len(problems)} problems in {root}")
    return len(problems)


def of_file(path: Path, root: Path) -> Iterator[str]:
    """The rules for a single file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
