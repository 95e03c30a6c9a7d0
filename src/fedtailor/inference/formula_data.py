"""Tables of sites as the rows of a formula's design."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
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
    unquoted,
)
from fedtailor.data.tabular.read import (
    as_frame,
    client_files,
    client_name,
    read_rows,
    read_table,
    split_by_client,
    table_from_frame,
)
from fedtailor.errors import DataError, nearest


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
    _refuse_absent(path, formula.site, read_rows(path)[1].columns)
    return split_by_client(path, formula.site)


def read_formula(data: Any, text: str, site: str) -> tuple[Formula, dict[str, ClientTable]]:
    """The formula and the tables of sites; where these are files, a factor that varies inside them is not the site."""
    formula = parse_formula(text, site)
    tables = read_sites(data, formula)
    is_one_table = not isinstance(data, Mapping) and not (
        isinstance(data, str | Path) and expand_home(Path(data)).is_dir()
    )
    if site or is_one_table:
        return formula, tables

    def varies(name: str) -> bool:
        columns = [table.columns[name] for table in tables.values() if name in table.columns]
        return any(column.names().n_unique() > 1 for column in columns)

    between = [name for name in (*(term.group for term in formula.random), formula.strata) if name and not varies(name)]
    return parse_formula(text, between[0] if between else "site"), tables


def _refuse_absent(origin: Any, column: str, known: Sequence[str]) -> None:
    if column not in known:
        raise DataError(
            f'{origin}: no column "{column}" that names the sites; name it by --site (site= in Python), or as '
            f"(1 | COLUMN); {nearest(column, known)}"
        )


def _split_frame(frame: Any, column: str) -> dict[str, ClientTable]:
    _refuse_absent("data", column, frame.columns)
    if gaps := frame[column].null_count():
        raise DataError(f'data: column "{column}", which names the sites, has no value in {gaps} rows')
    parts = frame.partition_by(column, as_dict=True, include_key=False)
    return {str(key[0]): table_from_frame(Path(str(key[0])), part) for key, part in sorted(parts.items(), key=str)}


def load_formula(data: Any, text: str, family: str, site: str = "") -> tuple[Design, FederatedData]:
    """The design of a formula and the rows of all sites by it."""
    formula, tables = read_formula(data, text, site)
    design = design_of(formula, family, kinds_of(formula, tables, family))
    notes = []
    if design.group:
        twice = sites_of_groups(list(tables.values()), design.group)
        if twice:
            notes.append(
                f'"{min(twice)}" of {design.group} occurs at several sites: taken as different groups, nested in '
                f"{formula.site} as ({formula.site}:{design.group}), not crossed with it"
            )
    each = {name: rows_of(design, table, name) for name, table in tables.items()}
    if design.group and all(rows.groups == 1 for rows in each.values()):
        raise DataError(
            f"formula: every {formula.site} has one {design.group} only; if {formula.site} is inside "
            f"{design.group}, name {design.group} as the sites' column by --site (site= in Python)"
        )
    if design.family == "binomial" and (levels := design.response_levels):
        notes.append(
            f'modelled is the probability that {unquoted(design.formula.response)} is "{levels[1]}", not "{levels[0]}"'
        )
    if left_out := sum(rows.left_out for rows in each.values()):
        notes.append(f"{left_out} rows with a missing value were left out")
    return design, data_of(design, {name: (rows.x, rows.y) for name, rows in each.items()}, tuple(notes))


def agreement(data: Any, text: str, family: str, site: str = "") -> str:
    """What sites of a federation need in their site.toml: formula and levels of columns, and what must be allowed."""
    import tomli_w

    formula, tables = read_formula(data, text, site)
    kinds = kinds_of(formula, tables, family)
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
