"""Makes the pages of docs/results. Resumable: finished runs are kept under runs/.

FEDTAILOR_DATA=... python benchmarks/evidence.py [PAGE ...]
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedtailor import algorithms
from fedtailor.experiments.config import CompareConfig, parse, read_toml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = {  # page -> what it shows: comparisons (TOML files), published tables (names), what scripts print
    "foundation": (
        "configs/foundation/fashion-mnist.toml",
        "configs/foundation/heart-disease.toml",
        "configs/foundation/qmnist.toml",
    ),
    "learn2pfed": (
        *(f"learn2pfed/table{name}" for name in ("1", "1-sorted", "1-mlp", "2", "3", "4", "4-100", "5", "6")),
        "benchmarks/learn2pfed_degrees.py",
    ),
    "duw": (
        "duw/figure3",
        "benchmarks/duw_claims.py",
        "benchmarks/duw_rule.py",
        "duw/table3",
        "duw/table3-rounds",
        "duw/figure2",
        "benchmarks/duw_cost.py",
    ),
    "fedselect": tuple(f"fedselect/{name}" for name in ("table1", "table1-others", "table2", "table3", "figure4")),
    "fedeq": tuple(
        f"fedeq/{name}"
        for name in (
            *("table1", "table2", "table1-shakespeare"),
            *("figure2", "figure3", "figure4", "figure4-equal", "figure5", "figure6"),
        )
    ),
    "federation": ("benchmarks/federation.py --table", "benchmarks/secure_sum.py"),
    "fit": ("benchmarks/fit.py --out runs/fit.json", "motley/school", "benchmarks/auto.py"),
    "cifar100": ("configs/cifar100/superclass.toml", "configs/cifar100/dirichlet.toml"),
    "leaderboard": (
        "benchmarks/leaderboard.py --json docs/results/leaderboard.json",
        "benchmarks/leaderboard.py --model cnn --json docs/results/leaderboard-cnn.json",
    ),
    "adapters": ("benchmarks/adapters.py",),
    "baselines": ("configs/baselines/fashion-mnist.toml", "configs/baselines/mnist.toml"),
}
SEVERAL = {  # pages of more than one algorithm
    "duw": ("DUW-FedAvg", "DUW-FedNova"),
    "fedavg-ft": ("FedAvg+FT", "FedProx+FT"),
    "learn2pfed": ("Learn2pFed-Net",),
}
FIGURES = ("<!-- figures -->", "<!-- /figures -->")  # in an algorithm's page, around what is written by this script


def main() -> None:
    for name in sys.argv[1:] or PAGES:
        parts = [shown(part) for part in PAGES[name]]
        intro = (RESULTS / f"{name}.intro.md").read_text(encoding="utf-8")
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        made = (
            f"Made with fedtailor {version('fedtailor')} at commit {commit}, torch {version('torch')}, "
            f"numpy {version('numpy')}, Python {platform.python_version()}, {os.cpu_count()} cores.\n"
        )
        (RESULTS / f"{name}.md").write_text("\n".join([intro, made, *parts]), encoding="utf-8")
        print(f"wrote docs/results/{name}.md")
    if "baselines" in (sys.argv[1:] or PAGES):
        write_figures()
    if "leaderboard" in (sys.argv[1:] or PAGES):
        write_ranks()


def shown(part: str) -> str:
    """One part of a page."""
    kinds = {".toml": comparison, ".py": script}
    return kinds.get(Path(part.split()[0]).suffix, table)(part)


def script(command: str) -> str:
    """What a script prints."""
    path = command.split()[0]
    told = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    title = (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].strip('"')
    body = told if told.startswith("|") or "\n|" in told else f"```\n{told}```\n"
    return f"## {title}\n\n`python {command}`\n\n{body}"


def write_figures() -> None:
    """Every algorithm's page gets its rows of the comparison of all algorithms."""
    tables = {}
    for config in PAGES["baselines"]:
        checked: CompareConfig = parse(read_toml(ROOT / config), CompareConfig, config)
        rows = json.loads((ROOT / "runs" / checked.compare.name / "table.json").read_text(encoding="utf-8"))
        tables[checked.data.source] = {row["algorithm"]: row for row in rows}
    for page in sorted((ROOT / "docs" / "algorithms").glob("*.md")):
        before, begin, rest = page.read_text(encoding="utf-8").partition(FIGURES[0])
        titles = SEVERAL.get(page.stem, ()) or tuple(t for t in next(iter(tables.values())) if t.lower() == page.stem)
        lines = [
            f"| {title} | {source} | " + " | ".join(_percent(rows[t]) for t in (title, "Local", "FedAvg")) + " |"
            for title in titles
            for source, rows in tables.items()
            if title in rows
        ]
        head = [
            "Test accuracy in %, 20 clients, Dirichlet 0.1, two seeds, as in "
            "[all algorithms](../results/baselines.md):",
            "",
            "| algorithm | data | accuracy | Local | FedAvg |",
            "|---|---|---:|---:|---:|",
        ]
        block = "\n".join([*head, *lines] if lines else ["See the [results](../index.md#results)."])
        after = rest.partition(FIGURES[1])[2]
        page.write_text(f"{before}{begin}\n{block}\n{FIGURES[1]}{after}", encoding="utf-8")


def write_ranks() -> None:
    """The page of an algorithm that is not in the comparison of all algorithms gets its rows of the leaderboard."""
    board = json.loads((RESULTS / "leaderboard.json").read_text(encoding="utf-8"))
    titles = {kind.title.lower(): kind.title for kind in algorithms.algorithms().values()}
    for page in sorted((ROOT / "docs" / "algorithms").glob("*.md")):
        before, begin, rest = page.read_text(encoding="utf-8").partition(FIGURES[0])
        old, end, after = rest.partition(FIGURES[1])
        block = ranked(titles.get(page.stem, ""), board)
        if block and "results/baselines.md" not in old:
            page.write_text(f"{before}{begin}\n{block}\n{end}{after}", encoding="utf-8")


def ranked(title: str, board: dict[str, list[dict[str, Any]]]) -> str:
    """An algorithm's accuracy and rank by column of the leaderboard, both in the round that validation selects."""
    lines = []
    for column, rows in board.items():
        at = {row["title"]: row["figures"][2] for row in rows}
        if title in at:
            rank = 1 + sum(value > at[title] for value in at.values())
            three = " | ".join(f"{at[t]:.2f}" if t in at else "" for t in (title, "Local", "FedAvg"))
            lines.append(f"| {column} | {three} | {rank} of {len(at)} |")
    head = [
        "Test accuracy in %, Fashion-MNIST, 20 clients, one seed, 15 rounds: see the",
        "[leaderboard](../results/leaderboard.md).",
        "",
        "| clients | its own | Local | FedAvg | rank |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *lines]) if lines else ""


def _percent(row: dict[str, Any]) -> str:
    return f"{100 * row['mean']:.2f} ± {100 * row['spread']:.2f}"


def comparison(config: str) -> str:
    """Run a comparison, or go on with it, and return its part of the page."""
    _fedtailor("compare", config)
    checked: CompareConfig = parse(read_toml(ROOT / config), CompareConfig, config)
    found = (ROOT / "runs" / checked.compare.name / "table.md").read_text(encoding="utf-8")
    seeds = ", ".join(map(str, checked.compare.seeds))
    return (
        f"## {checked.data.source}\n\n`fedtailor compare {config}` (seeds {seeds}, {checked.rounds} rounds)\n\n{found}"
    )


def table(name: str) -> str:
    """Run a published table again, or go on with it, and return its part of the page."""
    _fedtailor("reproduce", name)
    found = (ROOT / "runs" / f"{name.replace('/', '-')}-cpu" / "table.md").read_text(encoding="utf-8")
    title = read_toml(ROOT / "configs" / f"{name}.toml")["title"]
    return f"## {title}\n\n`fedtailor reproduce {name}`\n\n{found}"


def _fedtailor(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "fedtailor", *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
