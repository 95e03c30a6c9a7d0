"""Claims of Figures 2 and 3 of the DUW paper, checked on the saved curves and weight tables.

fedtailor reproduce duw/figure2
fedtailor reproduce duw/figure3
python benchmarks/duw_claims.py

At another scale, or with fewer seeds: python benchmarks/duw_claims.py --scale paper --seeds 1
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean

from fedtailor.experiments.store import RunFolder
from fedtailor.studies.explain import weights
from fedtailor.studies.grid import folder_name

COLUMNS = ("I: sizes", "II: labels", "III: speed", "IV: failures")


def folder(runs: Path, row: str, column: str, seed: int) -> Path:
    return runs / folder_name(f"{row} {column}", seed)


def curve(path: Path) -> list[float]:
    """Test accuracy of each round, in percent."""
    lines = [line for line in RunFolder(path).metrics() if "test" in line]
    return [100 * mean(line["test"]["accuracy"]) for line in lines]


def mean_weights(path: Path, rounds: slice = slice(None)) -> list[float]:
    """Of each client, over rounds, from the saved table."""
    table = list(weights(path).values())[rounds]
    return [mean(row[client] for row in table) for client in table[0]]


def variance(path: Path) -> float:
    """Of the learned weights over rounds, (28)."""
    lines = [line["report"] for line in RunFolder(path).metrics() if "variance_of_weights" in line.get("report", {})]
    return float(lines[-1]["variance_of_weights"])


def apart(path: Path, rounds: slice) -> float:
    """How far the largest weight is from the smallest, mean over rounds."""
    return mean(max(row.values()) - min(row.values()) for row in list(weights(path).values())[rounds])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scale", choices=("cpu", "paper"), default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    runs, seeds = Path(f"runs/duw-figure3-{asked.scale}"), range(asked.seeds)
    claims: list[tuple[str, bool, str]] = []

    def claim(text: str, found: list[tuple[bool, str]]) -> None:
        claims.append((text, all(holds for holds, _ in found), "; ".join(seen for _, seen in found)))

    def ends(row: str, column: str) -> list[float]:
        return [curve(folder(runs, row, column, s))[-1] for s in seeds]

    ours, plain, dr = (ends(row, "II: labels") for row in ("DUW-FedAvg", "FedAvg", "DR-FedAvg"))
    claim("II: DUW-FedAvg at least 75 %", [(x >= 75, f"{x:.2f}") for x in ours])
    claim("II: FedAvg below 60 %", [(x < 60, f"{x:.2f}") for x in plain])
    claim("II: DR-FedAvg below 60 %", [(x < 60, f"{x:.2f}") for x in dr])
    for column in ("III: speed", "IV: failures"):
        gains = []
        for s in seeds:
            curves = (curve(folder(runs, row, column, s)) for row in ("DUW-FedAvg", "FedAvg"))
            gains.append([a - b for a, b in zip(*curves, strict=True)])
        name = column.partition(":")[0]
        least = [(min(g[1:]) >= 0, f"{min(g[1:]):+.2f}") for g in gains]
        claim(f"{name}: DUW-FedAvg at least FedAvg in every round from the second on (least gain)", least)
        claim(f"{name}: above it on average (mean gain)", [(mean(g) > 0, f"{mean(g):+.2f}") for g in gains])
    gaps = [abs(a - b) for a, b in zip(ends("DUW-FedAvg", "I: sizes"), ends("FedAvg", "I: sizes"), strict=True)]
    claim("I: DUW-FedAvg and FedAvg within a point at the end", [(x <= 1, f"{x:.2f}") for x in gaps])

    def shown(w: list[float]) -> str:
        return " ".join(f"{x:.2f}" for x in w)

    of = {c: [mean_weights(folder(runs, "DUW-FedAvg", c, s)) for s in seeds] for c in COLUMNS}
    at = {c: [folder(runs, "DUW-FedAvg", c, s) for s in seeds] for c in COLUMNS}
    sizes = 4459 / 8570  # the share of the large client, its weight in FedAvg
    claim(
        "I: the large client (last) has the largest weight, above its share of samples, .52",
        [(max(w) == w[4] and w[4] > sizes, shown(w)) for w in of[COLUMNS[0]]],
    )
    claim(
        "II: both clients with labels of their own (first two) weigh more than any other",
        [(min(w[:2]) > max(w[2:]), shown(w)) for w in of[COLUMNS[1]]],
    )
    claim("III: the fast client (first) weighs most", [(max(w) == w[0], shown(w)) for w in of[COLUMNS[2]]])
    claim(
        "IV: the three reliable clients (last) weigh more than the other two",
        [(min(w[2:]) > max(w[:2]), shown(w)) for w in of[COLUMNS[3]]],
    )
    # when: the first rounds, the last, and the halves of ten
    first, last = slice(0, 3), slice(-3, None)

    def both(path: Path, one: slice, other: slice) -> tuple[float, float]:
        return apart(path, one), apart(path, other)

    pairs = [both(path, slice(0, -1), slice(-1, None)) for path in at[COLUMNS[0]]]
    claim(
        "I: weights nearly equal in the last round: less than half as far apart as before (before, last)",
        [(b < a / 2, f"{a:.2f} {b:.2f}") for a, b in pairs],
    )
    pairs = [(sum(mean_weights(p, first)[:2]), sum(mean_weights(p, last)[:2])) for p in at[COLUMNS[1]]]
    claim(
        "II: the weight of the two clients with labels of their own grows (first three rounds, last three)",
        [(b > a, f"{a:.2f} {b:.2f}") for a, b in pairs],
    )
    pairs = [both(path, slice(0, 5), slice(5, 10)) for path in at[COLUMNS[3]]]
    claim(
        "IV: weights differ mainly in the first half of the rounds (how far apart: first half, second)",
        [(a > b, f"{a:.2f} {b:.2f}") for a, b in pairs],
    )
    of_figure2 = Path(f"runs/duw-figure2-{asked.scale}")
    if of_figure2.exists():
        products = [variance(folder(of_figure2, "DUW-FedAvg", f"T = {t}", 0)) * sqrt(t) for t in (5, 10, 20)]
        falls = [(b < a, f"{b:.2e}") for a, b in pairwise(products)]
        claim(f"Figure 2: variance x sqrt(T) falls, from {products[0]:.2e} at T = 5 on", falls)
    print(f"| claim, seeds 0 to {asked.seeds - 1} | holds | found |\n|---|---|---|")
    for text, holds, seen in claims:
        print(f"| {text} | {'yes' if holds else 'no'} | {seen} |")


if __name__ == "__main__":
    main()
