"""School: exam scores of 15 362 pupils in 139 schools, from 25 yes-or-no columns and two numbers (Goldstein, 1991)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import SchoolConfig
from fedtailor.data.files import data_root, locate, read_bytes
from fedtailor.data.mat_file import read_cells
from fedtailor.data.tabular import Site, Target, assemble
from fedtailor.errors import DataError

FILE = "school/school.mat"
SCORES = (1, 70)  # the lowest and the highest score: the target is between 0 and 1


def load(config: SchoolConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Every school is a client."""
    tables = _read(locate(data_root(root), FILE, config.source))
    columns = tuple(f"x{i:02d}" for i in range(tables[0][0].shape[1] - 1))  # the last is a constant
    low, high = SCORES
    width = len(str(len(tables) - 1))
    sites = [
        Site(
            name=f"school-{i:0{width}d}",
            file=FILE,
            numeric={name: x[:, j] for j, name in enumerate(columns)},
            categorical={},
            y=(y - low) / (high - low),
        )
        for i, (x, y) in enumerate(tables)
    ]
    notes = (f"{sum(len(site.y) for site in sites)} pupils in {len(sites)} schools; scores {low} to {high} as 0 to 1",)
    target = Target("regression", name="score")
    return assemble(config.source, sites, columns, target, config, config.standardise, seed=seed, notes=notes)


def _read(path: Path) -> list[tuple[Any, Any]]:
    """Features and scores of each school."""
    try:
        cells = read_cells(read_bytes(path))
        tables = [
            (x.astype(np.float64), y.astype(np.float64)[:, 0]) for x, y in zip(cells["X"], cells["Y"], strict=True)
        ]
    except (ValueError, LookupError) as error:
        raise DataError(f"{path}: must hold cells X and Y, one for each school ({error}); put it there again") from None
    widths = {x.shape[1:] for x, _ in tables}
    if not tables or len(widths) != 1 or len(*widths) != 1 or any(len(x) != len(y) for x, y in tables):
        raise DataError(f"{path}: schools must have the same columns, and a score for each pupil; put it there again")
    return tables
