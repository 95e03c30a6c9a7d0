"""School: exam scores of 15 362 pupils in 139 schools, from 25 yes-or-no columns and two numbers (Goldstein, 1991)."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import SchoolConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.tabular.encode import SiteColumns, encode_sites
from fedtailor.data.tabular.preparation import TargetColumn
from fedtailor.errors import DataError

FILE = "school/school.mat"
SCORES = (1, 70)  # the lowest and the highest score: the target is between 0 and 1
# in a process of its own, which a damaged file may end inside scipy
READ = """
import sys, numpy, scipy.io
cells = scipy.io.loadmat(sys.argv[1], variable_names=["X", "Y"])
numpy.savez(sys.stdout.buffer, **{f"{k}{i}": v for k in "XY" for i, v in enumerate(cells[k].flat)})
"""


def load(config: SchoolConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    tables = read_schools(locate(data_root(root), FILE, config.source))
    columns = tuple(f"x{i:02d}" for i in range(tables[0][0].shape[1] - 1))  # the last is a constant
    low, high = SCORES
    width = len(str(len(tables) - 1))
    sites = [
        SiteColumns(
            name=f"school-{i:0{width}d}",
            file=FILE,
            numeric={name: x[:, j] for j, name in enumerate(columns)},
            categorical={},
            y=(y - low) / (high - low),
        )
        for i, (x, y) in enumerate(tables)
    ]
    notes = (f"{sum(len(site.y) for site in sites)} pupils in {len(sites)} schools; scores {low} to {high} as 0 to 1",)
    target = TargetColumn(name="score", task="regression")
    return encode_sites(config.source, sites, columns, target, config, config.standardise, seed=seed, notes=notes)


def read_schools(path: Path) -> list[tuple[Any, Any]]:
    """Features and scores of each school, from a MATLAB 5 file."""
    done = subprocess.run([sys.executable, "-I", "-c", READ, str(path)], capture_output=True, check=False)
    try:
        cells = np.load(io.BytesIO(done.stdout), allow_pickle=False)
        tables = [
            (cells[f"X{i}"].astype(np.float64), cells[f"Y{i}"].astype(np.float64)[:, 0]) for i in range(len(cells) // 2)
        ]
    except (EOFError, OSError, ValueError, LookupError, BadZipFile):
        raise DataError(f"{path}: must hold cells X and Y, one for each school; put it there again") from None
    widths = {x.shape[1:] for x, _ in tables}
    if not tables or len(widths) != 1 or len(*widths) != 1 or any(len(x) != len(y) for x, y in tables):
        raise DataError(f"{path}: schools must have the same columns, and a score for each pupil; put it there again")
    return tables
