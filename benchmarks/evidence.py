"""Makes the tables of docs/results from the configurations under configs/. Resumable: finished runs are kept.

FEDTAILOR_DATA=... python benchmarks/evidence.py [NAME ...]
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
PAGES = {
    "foundation": (
        "configs/foundation/fashion-mnist.toml",
        "configs/foundation/heart-disease.toml",
        "configs/foundation/qmnist.toml",
    ),
}


def main() -> None:
    for name in sys.argv[1:] or PAGES:
        sections = [section(config) for config in PAGES[name]]
        intro = RESULTS / f"{name}.intro.md"
        head = intro.read_text(encoding="utf-8") if intro.exists() else f"# {name}\n"
        made = (
            f"fedtailor {version('fedtailor')}, torch {version('torch')}, numpy {version('numpy')}, "
            f"Python {platform.python_version()}, {os.cpu_count()} cores. Figures: mean over clients, then mean ± "
            "standard deviation over seeds. `test` is the last round, `selected` the round with the best validation "
            "metric; `hurt` is the share of clients below Local of the same seed; bytes and seconds are per run.\n"
        )
        (RESULTS / f"{name}.md").write_text("\n".join([head, made, *sections]), encoding="utf-8")
        print(f"wrote docs/results/{name}.md")


def section(config: str) -> str:
    """Run one comparison (or go on with it) and return its part of the page."""
    subprocess.run([sys.executable, "-m", "fedtailor", "compare", config], cwd=ROOT, check=True)
    checked: CompareConfig = parse(read_toml(ROOT / config), CompareConfig, config)
    table = (ROOT / "runs" / checked.compare.name / "table.md").read_text(encoding="utf-8")
    seeds = ", ".join(map(str, checked.compare.seeds))
    return (
        f"## {checked.data.source}\n\n`fedtailor compare {config}` (seeds {seeds}, {checked.rounds} rounds)\n\n{table}"
    )


if __name__ == "__main__":
    main()
