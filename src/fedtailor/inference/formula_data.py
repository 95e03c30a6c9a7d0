"""Tables of sites as the rows of a formula's design."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtailor import algorithms
from fedtailor.core.algorithm import reply_names
from fedtailor.core.data import FederatedData
from fedtailor.data.files import expand_home
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.formula import (
    ColumnKinds,
    Design,
    Formula,
    data_of,
    design_of,
    kinds_of,
    parse_formula,
    rows_of,
    sites_of_groups,
)
from fedtailor.data.tabular.read import (
    as_frame,
    client_files,
    client_name,
    read_table,
    split_by_client,
    table_from_frame,
)
from fedtailor.errors import DataError


def read_sites(data: Any, formula: Formula) -> dict[str, ClientTable]:
    """Tables of sites by name: of a folder with a file for each, or of one table with a column that names them."""
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


def agreement(data: Any, text: str, family: str, site: str = "") -> str:
    """What sites of a federation need in their site.toml: formula and levels of columns, and what must be allowed."""
    import tomli_w

    formula = parse_formula(text, site)
    kinds = kinds_of(formula, read_sites(data, formula), family)
    program = design_of(formula, family, kinds).program  # refused before sites are told
    levels = {name: list(known) for name, known in kinds.levels.items()}
    about = {"path": "rows.csv", "formula": text, "family": family, "grouping": formula.site}
    allowed = {"algorithms": [program], "models": ["linear"], "sends": reply_names(algorithms.find(program))}
    described = about | {"numeric": list(kinds.numbers), "categories": levels}
    return tomli_w.dumps({"data": described, "policy": allowed})


def read_agreement(file: Path) -> Design:
    """The design that a file of `agreement` describes."""
    try:
        about = tomllib.loads(file.read_text(encoding="utf-8"))["data"]
        kinds = ColumnKinds(tuple(about["numeric"]), {k: tuple(v) for k, v in about.get("categories", {}).items()})
        return design_of(parse_formula(about["formula"], about.get("grouping", "")), about["family"], kinds)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: not what fedtailor model --agree prints ({error})") from None
