"""Makes the pages of docs/results. Resumable: finished runs are kept under runs/.

FEDTAILOR_DATA=... python benchmarks/evidence.py [PAGE ...]
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from fedtailor.runs.config import CompareConfig, parse, read_toml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = {  # page -> comparisons (TOML files) and published tables (names) that it shows
    "foundation": (
        "configs/foundation/fashion-mnist.toml",
        "configs/foundation/heart-disease.toml",
        "configs/foundation/qmnist.toml",
    ),
    "learn2pfed": tuple(
        f"learn2pfed/{name}"
        for name in ("table1", "table1-sorted", "table2", "table3", "table4", "table4-100", "table5", "table6")
    ),
}


def main() -> None:
    for name in sys.argv[1:] or PAGES:
        parts = [comparison(part) if part.endswith(".toml") else table(part) for part in PAGES[name]]
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
