"""All methods by the kind of heterogeneity, from results that are there: python -m benchmarks.verdict

Reads docs/results/tailor.json (losses of every client, from benchmarks/tailor.py) and the tables of other pages of
docs/results, and writes docs/results/verdict.md. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from benchmarks import records
from fedtailor.core.random import stream
from fedtailor.studies.significance import LEVEL, holm, signed_ranks

KINDS = {  # columns of benchmarks/tailor.py
    "label skew, strong": ("FMNIST 0.1", "CIFAR-10 0.1"),
    "label skew, mild": ("FMNIST 0.5", "CIFAR-10 0.5"),
    "concept shift": ("half permuted",),
    "feature shift": ("PACS",),
    "writers": ("writers",),
    "many small clients": ("100 clients",),
    "amounts of data": ("quantity",),
    "hospitals": ("hospitals",),
    "schools": ("School",),
    "meters": ("ECL",),
    "text": ("text",),
}
PAGES = {  # tables of other pages: title, page, heading
    "label skew, 20 clients": ("baselines", "fashion-mnist"),
    "label skew, digits": ("baselines", "mnist"),
    "hospitals, other settings": ("foundation", "heart-disease"),
    "100 writers": ("foundation", "qmnist"),
    "superclasses": ("cifar100", "cifar100"),
    "leaderboard, Dirichlet 0.1": ("leaderboard", "Dirichlet 0.1"),
    "leaderboard, two classes": ("leaderboard", "two classes per client"),
}
SELECTED = "selected on validation"  # a column's name
DRAWS = 500  # of the bootstrap over clients


@dataclass(frozen=True)
class Kind:
    """Clients of one kind under all methods that have them: a loss and a rank each, 1 is best."""

    name: str
    titles: tuple[str, ...]
    losses: NDArray[np.float64]  # [methods, clients]

    @property
    def ranks(self) -> NDArray[np.float64]:
        return np.asarray(stats.rankdata(self.losses, axis=0))

    @property
    def first(self) -> int:
        """The method with the best mean rank."""
        return int(self.ranks.mean(1).argmin())

    def level(self) -> list[str]:
        """Methods that are not behind the first beyond chance (Wilcoxon over clients, Holm), the first included."""
        others = [i for i in range(len(self.titles)) if i != self.first]
        apart = [self.losses[i] - self.losses[self.first] for i in others]
        ps = holm([signed_ranks(d) for d in apart])
        behind = {i for i, p, d in zip(others, ps, apart, strict=True) if p < LEVEL and d.mean() > 0}
        return [t for i, t in enumerate(self.titles) if i not in behind]

    def interval(self, title: str) -> tuple[float, float, float]:
        """Mean rank, and 95 % of its bootstrap over clients."""
        mine = self.ranks[self.titles.index(title)]
        drawn = stream("verdict", self.name, title).integers(0, len(mine), (DRAWS, len(mine)))
        low, high = np.quantile(mine[drawn].mean(1), (0.025, 0.975))
        return float(mine.mean()), float(low), float(high)


def kinds_of(columns: dict[str, dict[str, dict[str, list[float]]]]) -> list[Kind]:
    """Kinds whose columns are there, with the methods that all of them have."""
    found = []
    for name, parts in KINDS.items():
        here = [columns[part]["clients"] for part in parts if part in columns]
        if here:
            titles = tuple(t for t in here[0] if all(t in part for part in here))
            losses = np.array([[v for part in here for v in part[t]] for t in titles])
            found.append(Kind(name, titles, losses))
    return found


def ranks_table(kinds: Sequence[Kind], columns: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Mean ranks by kind, and what a method costs; bold is level with the first."""
    titles = list(dict.fromkeys(t for kind in kinds for t in kind.titles))
    level = [kind.level() for kind in kinds]
    lines = ["| | " + " | ".join(k.name for k in kinds) + " | time | bytes up |", "|---" * (len(kinds) + 3) + "|"]
    for title in titles:
        cells = []
        for kind, best in zip(kinds, level, strict=True):
            if title not in kind.titles:
                cells.append("")
                continue
            rank, low, high = kind.interval(title)
            text = f"{rank:.1f} ({low:.1f}-{high:.1f})"
            cells.append(f"**{text}**" if title in best else text)
        lines.append(f"| {title} | {' | '.join([*cells, *cost(columns, title)])} |")
    return lines


def cost(columns: dict[str, dict[str, dict[str, float]]], title: str) -> list[str]:
    """Processor time of training and bytes sent by clients, over those of FedAvg; mean over columns."""
    out = []
    for key in ("seconds", "up"):
        ratios = [c[key][title] / c[key]["FedAvg"] for c in columns.values() if title in c[key] and c[key]["FedAvg"]]
        out.append(f"{mean(ratios):.2f}")
    return out


def advice(kinds: Sequence[Kind], columns: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """For each kind the first, and the cheapest method that is level with it."""
    lines = ["| clients differ in | first | level with it, cheapest first | behind it |", "|---|---|---|---|"]
    for kind in kinds:
        level = [t for t in kind.level() if t != kind.titles[kind.first]]
        level.sort(key=lambda t: float(cost(columns, t)[0]))
        behind = [t for t in kind.titles if t not in level and t != kind.titles[kind.first]]
        names = (kind.titles[kind.first], ", ".join(level) or "none", ", ".join(behind) or "none")
        lines.append(f"| {kind.name} | {' | '.join(names)} |")
    return lines


def read_table(page: Path, heading: str) -> dict[str, float]:
    """A figure of every row of the table under a heading; nothing if there is no such page.

    It is the first figure, or that of the round which validation selects where there are several habits of reporting.
    Tables that follow, of tests for instance, are others.
    """
    if not page.exists():
        return {}
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.lstrip("# ") == heading and line.startswith("#")), None)
    rows: dict[str, float] = {}
    at = 1
    for line in lines[len(lines) if start is None else start + 1 :]:
        if line.startswith("#") or (rows and not line.startswith("|")):  # the next section, or the end of the table
            break
        cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
        at = cells.index(SELECTED) if SELECTED in cells else at
        if len(cells) > at and cells[at][:1].isdigit():
            rows[cells[0]] = float(cells[at].split()[0])
    return rows


def other_tables(folder: Path) -> list[str]:
    """Ranks of all methods in tables of other pages, best mean rank first."""
    tables = {title: rows for title, (page, at) in PAGES.items() if (rows := read_table(folder / f"{page}.md", at))}
    ranks = {t: {m: 1 + sum(o > v for o in rows.values()) for m, v in rows.items()} for t, rows in tables.items()}
    share = {
        m: [ranks[t][m] / len(ranks[t]) for t in tables if m in ranks[t]] for rows in tables.values() for m in rows
    }
    lines = ["| | " + " | ".join(tables) + " |", "|---" + "|---:" * len(tables) + "|"]
    lines.append("| methods | " + " | ".join(str(len(rows)) for rows in tables.values()) + " |")
    for method in sorted(share, key=lambda m: (mean(share[m]), m)):
        cells = [f"{ranks[t][method]} ({tables[t][method]:.1f})" if method in ranks[t] else "" for t in tables]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", type=Path, default=Path("docs/results"))
    folder: Path = parser.parse_args().page
    columns = json.loads((folder / "tailor.json").read_text(encoding="utf-8"))
    kinds = kinds_of(columns)
    intro = (folder / "verdict.intro.md").read_text(encoding="utf-8").rstrip()
    parts = [intro, "", records.note("verdict", "python -m benchmarks.verdict"), "", "## Which to take"]
    parts += ["", *advice(kinds, columns), "", "## Ranks", "", *ranks_table(kinds, columns)]
    parts += ["", "## All methods, in other tables", "", *other_tables(folder)]
    (folder / "verdict.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
