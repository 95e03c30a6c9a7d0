"""UCI heart disease: 13 columns at four hospitals; the target is whether heart disease is present."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import HeartDiseaseConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import read_bytes
from fedtailor.data.tabular.encode import SiteColumns, encode_sites
from fedtailor.data.tabular.preparation import Floats, TargetColumn
from fedtailor.errors import DataError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
CATEGORICAL = frozenset({"sex", "cp", "fbs", "restecg", "exang", "slope", "thal"})
ZERO_IS_MISSING = ("trestbps", "chol")  # nobody has a blood pressure or cholesterol of 0; one hospital wrote only 0


def load(config: HeartDiseaseConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    folder = data_root(root)
    sites = [_read(hospital, folder) for hospital in HOSPITALS]
    target = TargetColumn(name="num", task="classification", classes=("absent", "present"))
    notes = (
        "samples per client: " + ", ".join(f"{site.name} {len(site.y)}" for site in sites),
        f"a recorded 0 counts as missing in: {', '.join(ZERO_IS_MISSING)}",
    )
    return encode_sites(
        *("heart-disease", sites, COLUMNS, target, config, config.standardise),
        seed=seed,
        notes=notes,
        zero_is_missing=ZERO_IS_MISSING,
    )


def _read(hospital: str, root: Path) -> SiteColumns:
    path = locate(root, f"heart_disease/processed.{hospital}.data", "heart-disease")
    table = _parse(path)
    for column in ZERO_IS_MISSING:
        values = table[:, COLUMNS.index(column)]
        values[values == 0] = np.nan
    if np.isnan(table[:, -1]).any():
        raise DataError(f"{path}: the target (last column) is missing in some rows; fetch the file again")
    columns = dict(zip(COLUMNS, table.T, strict=False))
    return SiteColumns(
        name=hospital,
        file=path.name,
        numeric={name: values for name, values in columns.items() if name not in CATEGORICAL},
        categorical={
            name: [None if np.isnan(v) else f"{v:g}" for v in values]
            for name, values in columns.items()
            if name in CATEGORICAL
        },
        y=(table[:, -1] > 0).astype(np.int64),
    )


def _parse(path: Path) -> Floats:
    rows = []
    for number, line in enumerate(read_bytes(path).decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = [np.nan if cell.strip() == "?" else float(cell) for cell in line.split(",")]
        except ValueError:
            row = []
        if len(row) != len(COLUMNS) + 1:
            raise DataError(f"{path}: line {number} is not {len(COLUMNS) + 1} numbers; fetch the file again")
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: empty file; fetch it again")
    return np.array(rows)
