"""What the pages of docs/results are written from: docs/results/records, a file per page.

A row carries its figures as they are shown, the version, commit, seeds and command of its runs, and the digest of a
miniature of its own configuration (benchmarks/miniature.py). Scripts with results of their own note where these came
from with `note`.
"""

from __future__ import annotations

import json
import os
import platform
import string
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.miniature import Found
from fedtailor.version import __version__

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
RECORDS = RESULTS / "records"
NOTES = "scripts"  # the file of what scripts with results of their own have noted
CHANGED = "changed"


@dataclass(frozen=True)
class Provenance:
    """What made the figures of a row."""

    version: str
    commit: str  # "" if nobody noted it
    seeds: tuple[int, ...] = ()
    command: str = ""
    is_kept: bool = True  # False: the runs are lost, and the commit is that since which the page has the figures

    @property
    def text(self) -> str:
        at = f" at commit {self.commit}" if self.commit else " at a commit that was not noted"
        if not self.is_kept:
            at = f", on this page since commit {self.commit}, run folders lost"
        seeds = f", {seeds_text(self.seeds)}" if self.seeds else ""
        return f"fedtailor {self.version}{at}{seeds}"


@dataclass
class RecordedRow:
    """A row of a table."""

    name: str
    cells: dict[str, str]  # by column, as shown
    made: Provenance
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # that a search found, by column
    digests: dict[str, Found] = field(default_factory=dict)  # by the first column with that configuration
    digest_commit: str = ""  # at which the miniatures ran; another than that of the runs if they had none
    changed: tuple[str, ...] = ()  # columns whose miniature gives other numbers now


@dataclass
class RecordedPart:
    """A table of a page, or what a script printed."""

    name: str  # "fedeq/table1", "configs/cifar100/dirichlet.toml", "benchmarks/duw_rule.py"
    title: str
    command: str
    scale: str = "cpu"
    columns: tuple[str, ...] = ()  # the first is the heading of the rows
    rows: list[RecordedRow] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # lines below the table
    text: str = ""  # of a script
    made: Provenance | None = None  # of a script

    def row(self, name: str) -> RecordedRow:
        """A row by name."""
        return next(row for row in self.rows if row.name == name)

    def put(self, row: RecordedRow) -> None:
        """Add a row, or replace the one of this name."""
        at = next((i for i, old in enumerate(self.rows) if old.name == row.name), len(self.rows))
        self.rows[at : at + 1] = [row]


def commit() -> str:
    """The commit of the work tree, and whether its code or configurations are others."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    is_dirty = git("status", "--porcelain", "--", "src", "configs")
    return git("rev-parse", "--short=7", "HEAD") + ("-dirty" if is_dirty else "")


def here(command: str, seeds: Iterable[int] = ()) -> Provenance:
    """What is computed now."""
    return Provenance(__version__, commit(), tuple(seeds), command)


def machine() -> str:
    """Versions and cores."""
    libraries = f"torch {version('torch')}, numpy {version('numpy')}, Python {platform.python_version()}"
    return f"{libraries}, {os.cpu_count()} cores"


def note(name: str, command: str, seeds: Iterable[int] = ()) -> str:
    """Note where results of a script came from; the sentence for its page."""
    made = here(command, seeds)
    path = RECORDS / f"{NOTES}.json"
    noted = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    _write(path, dict(sorted((noted | {name: asdict(made)}).items())))
    return f"Made with {made.text}, by `{command}`; {machine()}."


def read(page: str) -> list[RecordedPart]:
    """The parts of a page, in order; none if there is no record."""
    path = RECORDS / f"{page}.json"
    if not path.exists():
        return []
    return [_part(part) for part in json.loads(path.read_text(encoding="utf-8"))]


def pages() -> list[str]:
    """Pages with a record."""
    return sorted(path.stem for path in RECORDS.glob("*.json") if path.stem != NOTES)


def write(page: str, parts: Sequence[RecordedPart]) -> None:
    """Write the record of a page."""
    _write(RECORDS / f"{page}.json", [{k: v for k, v in asdict(part).items() if v} for part in parts])


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _part(stored: dict[str, Any]) -> RecordedPart:
    rows = [
        RecordedRow(
            **row
            | {"made": _made(row["made"]), "changed": tuple(row["changed"])}
            | {"digests": {c: d if isinstance(d, str) else tuple(d) for c, d in row["digests"].items()}}
        )
        for row in stored.get("rows", [])
    ]
    made = _made(stored["made"]) if "made" in stored else None
    lists = {key: tuple(stored.get(key, ())) for key in ("columns", "notes")}
    return RecordedPart(**stored | lists | {"rows": rows, "made": made})


def _made(stored: dict[str, Any]) -> Provenance:
    return Provenance(**stored | {"seeds": tuple(stored["seeds"])})


def seeds_text(seeds: Sequence[int]) -> str:
    """Seeds in words."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if len(seeds) > 2 and all(b == a + 1 for a, b in pairwise(seeds)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def markdown(part: RecordedPart) -> str:
    """The part as it stands on the page; letters in the last column say which runs a row is of."""
    if part.made is not None:
        return f"## {part.title}\n\n`{part.command}`\n\n{part.text}\nMade with {part.made.text}.\n"
    letters: dict[str, str] = {}
    head, *columns = part.columns
    lines = [f"| {head} | {' | '.join(columns)} | runs |", "|---" + "|---:" * len(columns) + "|---|"]
    for row in part.rows:
        letter = letters.setdefault(_runs_text(row, part.command), string.ascii_lowercase[len(letters)])
        if row.changed:
            whole = {*row.changed} >= {*row.digests}
            letter += f", {CHANGED}" + ("" if whole else f": {', '.join(row.changed)}")
        lines.append("| " + " | ".join([row.name, *(row.cells.get(c, "") for c in columns), letter]) + " |")
    told = [f"- {letter}: {text}" for text, letter in letters.items()]
    told += [_changed_text()] if any(row.changed for row in part.rows) else []
    return (
        "\n".join([f"## {part.title}", "", f"`{part.command}`", "", *lines, "", "Runs:", "", *told, *part.notes]) + "\n"
    )


def _runs_text(row: RecordedRow, command: str) -> str:
    other = f", `{row.made.command}`" if row.made.command not in ("", command) else ""
    since = f", miniature since {row.digest_commit}" if row.digest_commit != row.made.commit else ""
    return f"{row.made.text}{other}" + (since if row.digests else ", no miniature")


def _changed_text() -> str:
    return f"- {CHANGED}: the code gives other numbers now than when the miniature was recorded (`make evidence-check`)"


def page_text(intro: str, parts: Sequence[RecordedPart]) -> str:
    """A whole page."""
    return "\n".join([intro.rstrip() + "\n", *map(markdown, parts)])
