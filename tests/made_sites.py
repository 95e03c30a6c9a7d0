"""Small folders of CSV files: sites that agree, and one where everything works the other way round."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np


def make_sites(folder: Path, sites: int = 4, rows: int = 60, outlier: bool = True, numbers: bool = False) -> Path:
    """Files s0.csv, s1.csv, ... with the columns a, b, ward and outcome (a class, or a number)."""
    draw = np.random.default_rng(5)
    folder.mkdir(parents=True)
    for site in range(sites):
        x, ward = draw.normal(size=(rows, 2)), draw.choice(["north", "south"], rows)
        y = (x @ [2.0, -1.0] + (ward == "north")) * (-1 if outlier and site == sites - 1 else 1)
        y = y + 0.3 * draw.normal(size=rows)
        with (folder / f"s{site}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["a", "b", "ward", "outcome"])
            for values, where, value in zip(x, ward, y, strict=True):
                told = f"{100 + 10 * value:.3f}" if numbers else ("ill" if value > 0 else "well")
                lines.writerow([*(f"{v:.3f}" for v in values), where, told])
    return folder
