"""Notebooks made from pages of the docs: python tools/notebooks.py writes notebooks/*.ipynb.

Text becomes text, Python becomes cells, a command becomes %fedtailor, and a block that names a file writes it.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "first-comparison": "docs/tutorial.md",
    "own-hospital-data": "docs/how-to/own-data.md",
    "method-with-the-tape": "docs/how-to/tape.md",
}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.(?:toml|py))\n")
_SETUP = ("make ", "source ", "pip ", "python3 -m venv")


def notebook(name: str, page: str) -> dict[str, Any]:
    """The notebook of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    cells = [_cell("markdown", _badge(name) + f"Made from `{page}` by `python tools/notebooks.py`.")]
    cells.append(_cell("code", "# on a machine without it: %pip install fedtailor\n%load_ext fedtailor.cli.notebook"))
    at = 0
    for block in _BLOCK.finditer(text):
        cells += _markdown(text[at : block.start()], page)
        cells += _code(block[1], block[2])
        at = block.end()
    cells += _markdown(text[at:], page)
    for number, cell in enumerate(cells):
        cell["id"] = f"{name}-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _code(language: str, text: str) -> list[dict[str, Any]]:
    if (file := _FILE.match(text)) is not None:
        return [_cell("code", f"%%writefile {file[1]}\n{text.rstrip()}")]
    if language == "python":
        return [_cell("code", text.rstrip())]
    if language == "sh":
        lines = [line for line in text.splitlines() if not line.startswith(_SETUP)]
        return [_cell("code", "\n".join(f"%{line}" for line in lines))] if lines else []
    return [_cell("markdown", f"```{language}\n{text}```")]


def _markdown(text: str, page: str) -> list[dict[str, Any]]:
    folder = Path(page).parent
    moved = re.sub(r"\]\((?!http|#)([^)]+)\)", lambda link: f"](../{_normal(folder / link[1])})", text)
    return [_cell("markdown", moved.strip())] if moved.strip() else []


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def _badge(name: str) -> str:
    """To run it online, once the project has a public address."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    place = str(urls.get("Repository", "")).removeprefix("https://github.com/")
    if not place:
        return ""
    target = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}.ipynb"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({target})\n\n"


def _cell(kind: str, source: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": "", "metadata": {}, "source": source.splitlines(keepends=True), **extra}


def texts() -> dict[Path, str]:
    """Every notebook as it should stand on disk."""
    made = {ROOT / f"notebooks/{name}.ipynb": notebook(name, page) for name, page in PAGES.items()}
    return {path: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for path, content in made.items()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
