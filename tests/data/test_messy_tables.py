"""Tables as people have them: each done right, or asked about with the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import FolderConfig
from fedtailor.data.tabular.prepare import prepare_tables
from fedtailor.data.tabular.read import read_client_tables
from fedtailor.errors import DataError

ROWS = 24


def prepared(folder: Path, column: dict[str, list[Any]], **options: Any) -> FederatedData:
    """Two sites with a number, a target and the column, by site."""
    rng = np.random.default_rng(0)
    for site, values in column.items():
        lines = [f"{rng.normal():.4f};{values[i % len(values)]};{rng.normal():.4f}" for i in range(ROWS)]
        (folder / f"{site}.csv").write_text("\n".join(["a;b;y", *lines]) + "\n")
    config = FolderConfig(path=folder, target="y", **options)
    return prepare_tables(read_client_tables(config), config, 0)


def test_amounts_as_in_most_of_europe(tmp_path: Path) -> None:
    values = ["3.005,63 EUR", "12,50 EUR", "1.200 EUR", "7 EUR"]
    data = prepared(tmp_path, {"north": values, "south": values}, standardise="none")
    assert data.features == ("a", "b")
    assert sorted(set(data.train.x[:, 1].tolist())) == [7, 12.5, 1200, 3005.63]


def test_a_month_that_cannot_be_one_settles_all_dates(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"north": ["05/20/2024", "06/01/2024"], "south": ["05/06/2024"]}, standardise="none")
    days = np.array(["2024-05-20", "2024-06-01", "2024-05-06"], dtype="datetime64[D]").astype(int)
    assert set(data.train.x[:, 1].tolist()) == set(days.tolist())
    assert data.preparation.columns[1].date_order == "month"


@pytest.mark.parametrize("values", [["05/06/2024"], ["05/20/2024", "20/05/2024"]])
def test_dates_that_do_not_settle_it_are_refused(values: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match='column "b" has dates such as'):
        prepared(tmp_path, {"north": values, "south": values})


def test_postal_codes_are_no_numbers(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"north": ["01234", "02345"], "south": ["98765", "97531"]})
    assert data.features == ("a", "b=01234", "b=02345", "b=97531", "b=98765")


def test_y_and_yes_are_one_category(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"north": ["Yes", "Y", "No"], "south": ["yes", "N", "No", "Yes"]})
    assert data.features == ("a", "b=No", "b=Yes")
    letters = prepared(tmp_path, {"north": ["Y", "N", "X"], "south": ["Y", "N", "X"]})
    assert letters.features == ("a", "b=N", "b=X", "b=Y")


def one_file(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text)
    return read_client_tables(FolderConfig(path=path, target="y", client_column="site"))


def test_a_bad_value_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    rows = [f"{site},1.5,{row}.25" for site in ("n", "s") for row in range(15)]
    rows[20] = "s,many,0.5"
    tables = one_file(tmp_path / "all.csv", "site,a,y\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r'"many" in data row 21 '):
        prepare_tables(tables, FolderConfig(path=tmp_path / "all.csv", target="y", client_column="site"), 0)


def test_names_of_sites_that_differ_in_capitals_are_asked_about(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'"North" and, in data row 3, "north"'):
        one_file(tmp_path / "all.csv", "site,a,y\nNorth,1,2\nSouth,1,2\nnorth,2,3\n")


def test_separators_at_the_ends_of_lines_are_no_columns(tmp_path: Path) -> None:
    tables = one_file(tmp_path / "all.csv", "site,a,y,,\nn,1,2,,\ns,2,3,,\n")
    assert tables["n"].names == ("a", "y")
    with pytest.raises(DataError, match="column 4 has no name"):
        one_file(tmp_path / "all.csv", "site,a,y,\nn,1,2,9\ns,2,3,\n")


def test_a_title_above_the_header_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1 has one field, line 2 has 3; remove a title"):
        one_file(tmp_path / "all.csv", "Patients of 2024\nsite,a,y\nn,1,2\ns,2,3\n")
