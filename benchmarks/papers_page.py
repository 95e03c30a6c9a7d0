"""Writes docs/results/papers.md, the papers item by item, from the records: python -m benchmarks.papers_page"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from benchmarks import records
from benchmarks.records import RECORDS, RESULTS, RecordedPart
from fedtailor.experiments.config import read_toml

PAPERS = {
    "learn2pfed": "Learn2pFed",
    "duw": "DUW",
    "fedeq": "FeDEQ",
    "fedselect": "FedSelect",
}
VERDICTS = ("reproduced", "not reproduced", "not possible here")
CELL = re.compile(r"\{([^{}|]+)\|([^{}|]+)\|([^{}|]+)\}")  # {table|row|column}, {table@paper|row|column}
Item = dict[str, Any]


def items() -> dict[str, list[Item]]:
    """The items of each paper."""
    return dict(read_toml(RECORDS / "papers.toml"))


def parts() -> dict[str, RecordedPart]:
    """All tables of all records, by name; those at the paper's size as "NAME@paper"."""
    every = [part for page in records.pages() for part in records.read(page)]
    return {part.name + ("@paper" if part.scale == "paper" else ""): part for part in every}


def with_figures(text: str, tables: dict[str, RecordedPart]) -> str:
    """The text with every reference to a cell replaced by our figure in it."""

    def figure(match: re.Match[str]) -> str:
        table, row, column = match.groups()
        return tables[table].row(row).cells[column].partition(" (")[0]

    return CELL.sub(figure, text)


def line(item: Item, tables: dict[str, RecordedPart]) -> str:
    """A row of the page."""
    ours = with_figures(item["ours"], tables)
    where = [f"[page]({item['page']}.md)"] if "page" in item else []
    where += [f"`{test}`" for test in item.get("tests", ())]
    why = with_figures(item.get("why", ""), tables)
    cells = [
        item["item"],
        item["place"],
        _sized(item["theirs"], item.get("their_size", "")),
        " ".join([_sized(ours, item.get("our_size", "")), *where]),
        f"**{item['verdict']}**" + (f": {why}" if why else ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _sized(figure: str, size: str) -> str:
    return f"{figure}<br>*{size}*" if size else figure


def page() -> str:
    """The whole page."""
    tables, every = parts(), items()
    counts = {title: Counter(item["verdict"] for item in every[name]) for name, title in PAPERS.items()}
    out = [(RESULTS / "papers.intro.md").read_text(encoding="utf-8")]
    out += ["| | items | " + " | ".join(VERDICTS) + " |", "|---" + "|---:" * (1 + len(VERDICTS)) + "|"]
    for title, count in counts.items():
        out.append(f"| {title} | {count.total()} | " + " | ".join(str(count[v]) for v in VERDICTS) + " |")
    for name, title in PAPERS.items():
        out += ["", f"## {title}", "", "| item | where | the paper's | ours | verdict |", "|---|---|---|---|---|"]
        out += [line(item, tables) for item in every[name]]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    (RESULTS / "papers.md").write_text(page(), encoding="utf-8")
    print("wrote docs/results/papers.md")
