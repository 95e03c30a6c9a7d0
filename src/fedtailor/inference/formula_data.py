"""Tables of sites as the rows of a formula's design."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData, Rows
from fedtailor.data.files import expand_home
from fedtailor.data.splits import starts
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.formula import (
    Design,
    Formula,
    design_of,
    kinds_of,
    parse_formula,
    rows_of,
    sites_of_groups,
)
from fedtailor.data.tabular.read import as_frame, client_files, client_name, read_table, split_by_client, table_from_frame
from fedtailor.errors import DataError


def read_sites(data: Any, formula: Formula) -> dict[str, ClientTable]:
    """Tables of sites by name: from a folder with a file for each, or one file or frame with a column that names them."""
    if isinstance(data, Mapping) and all(hasattr(frame, "columns") for frame in data.values()):
        return {str(name): table_from_frame(Path(str(name)), as_frame(frame, name)) for name, frame in data.items()}
    if not isinstance(data, str | Path):
        return _split_frame(as_frame(data, "data"), formula.site)
    path = expand_home(Path(data))
    if path.is_dir():
        return {name: read_table(file) for name, file in client_files(path).items()}
    if client_name(path) is None or not path.is_file():
        raise DataError(f"{path}: no such table; name a file, or a folder with one file per site")
    return split_by_client(path, formula.site)


def _split_frame(frame: Any, column: str) -> dict[str, ClientTable]:
    if column not in frame.columns:
        raise DataError(f'data: no column "{column}", which names the sites; give site="COLUMN" or a frame for each')
    parts = frame.partition_by(column, as_dict=True, include_key=False)
    return {str(key[0]): table_from_frame(Path(str(key[0])), part) for key, part in sorted(parts.items(), key=str)}


def load_formula(data: Any, text: str, family: str, site: str = "") -> tuple[Design, FederatedData]:
    """The design of a formula and the rows of all sites by it."""
    formula = parse_formula(text, site)
    tables = read_sites(data, formula)
    design = design_of(formula, family, kinds_of(formula, tables, family))
    notes = []
    if design.group:
        twice = sites_of_groups(list(tables.values()), design.group)
        if twice:
            notes.append(f'"{min(twice)}" of {design.group} occurs at several sites: counted as different groups')
    each = {name: rows_of(design, table, name) for name, table in tables.items()}
    if left_out := sum(rows.left_out for rows in each.values()):
        notes.append(f"{left_out} rows with a missing value were left out")
    return design, data_of(design, {name: (rows.x, rows.y) for name, rows in each.items()}, tuple(notes))


def data_of(
    design: Design, rows: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]], notes: tuple[str, ...] = ()
) -> FederatedData:
    """Designs of sites as a federation's data; all rows are training rows."""
    sizes = [len(y) for _, y in rows.values()]
    x = torch.from_numpy(np.concatenate([x for x, _ in rows.values()]))
    y = torch.from_numpy(np.concatenate([y for _, y in rows.values()]))[:, None]
    none = Rows(x[:0], y[:0], starts([0] * len(sizes)))
    return FederatedData(
        name="formula",
        task="regression",
        clients=tuple(rows),
        train=Rows(x, y, starts(sizes)),
        val=none,
        test=none,
        outputs=1,
        features=design.features,
        notes=notes,
    )
