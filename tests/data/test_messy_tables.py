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


def notes_of(folder: Path, column: dict[str, list[Any]], **options: Any) -> str:
    return "\n".join(prepared(folder, column, **options).notes)


def test_a_year_alone_among_dates_is_named_by_its_row(tmp_path: Path) -> None:
    values = ["2021-03-04", "2021-07-08", "2022"]
    with pytest.raises(DataError, match='column "b" has dates, and in data row 3 the year "2022" alone'):
        prepared(tmp_path, {"north": values, "south": values[:2]})
    years = prepared(tmp_path, {"north": ["2021", "2022"], "south": ["2020"]}, standardise="none")
    assert set(years.train.x[:, 1].tolist()) == {2020, 2021, 2022}


def test_repeated_rows_are_counted_and_named(tmp_path: Path) -> None:
    data = {"north": list(range(ROWS)), "south": list(range(ROWS))}
    assert " rows repeat " not in notes_of(tmp_path, data)
    file = tmp_path / "south.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, *lines[1:5]]) + "\n")
    config = FolderConfig(path=tmp_path, target="y")
    notes = "\n".join(prepare_tables(read_client_tables(config), config, 0).notes)
    assert (
        "4 rows repeat an earlier one of their site in every column and are counted again: "
        f"south.csv, data row {ROWS + 1};"
    ) in notes


def test_rows_of_few_values_may_repeat(tmp_path: Path) -> None:
    for site in ("north", "south"):
        (tmp_path / f"{site}.csv").write_text("a,b,y\n" + "1,0,1\n0,1,0\n1,1,1\n" * 9)
    config = FolderConfig(path=tmp_path, target="y")
    assert " rows repeat " not in "\n".join(prepare_tables(read_client_tables(config), config, 0).notes)


def test_a_code_for_a_missing_number_is_clipped_and_asked_about(tmp_path: Path) -> None:
    ages = [*range(30, 30 + ROWS - 2), 999, 999]
    notes = notes_of(tmp_path, {"north": ages, "south": ages})
    assert (
        f'column "b": 4 values are far from all others and are clipped to the limit: north row {ROWS - 1} (999)'
        in notes
    )
    assert "leave them empty if they stand for missing values" in notes


def test_free_text_is_left_out_for_that_reason(tmp_path: Path) -> None:
    values = [f"patient {i} came to room {i % 7}, better" for i in range(ROWS)]
    data = prepared(
        tmp_path, {"north": values, "south": [f"{v} again" for v in values], "east": [f"{v}!" for v in values]}
    )
    assert data.features == ("a",)
    notes = "\n".join(data.notes)
    assert 'column "b" is left out: free text is not read' in notes
    assert "identify rows" not in notes


def target_note(folder: Path, values: list[Any]) -> str:
    for site in ("north", "south"):
        rows = [f"{i},{value}" for i, value in enumerate(values)]
        (folder / f"{site}.csv").write_text("a,y\n" + "\n".join(rows) + "\n")
    config = FolderConfig(path=folder, target="y")
    data = prepare_tables(read_client_tables(config), config, 0)
    return next(note for note in data.notes if note.startswith('target "y"'))


def test_a_code_among_classes_is_asked_about(tmp_path: Path) -> None:
    assert "if 9 stands for a missing value, leave those cells empty" in target_note(
        tmp_path, [1, 2, 2, 1, 9, 1, 2] * 4
    )
    assert "missing" not in target_note(tmp_path, [1, 2, 3, 1, 4, 1, 2] * 4)
    assert "missing" not in target_note(tmp_path, [*range(10)] * 3)


def test_fifteen_counts_are_not_taken_for_classes_without_a_word(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(5, size=200).clip(max=14).tolist()
    note = target_note(tmp_path, [*range(15), *counts])
    assert note.startswith('target "y": classification')
    assert "--task count" in note
    assert "--task count" not in target_note(tmp_path, [*range(10)] * 20)  # digits


def test_files_of_windows_are_read_and_named(tmp_path: Path) -> None:
    text = "site,ort,y\nn,Köln,2\nn,Ulm,4\ns,Köln,3\ns,Ulm,5\n"
    (tmp_path / "all.csv").write_bytes(text.encode("latin-1"))
    tables = read_client_tables(FolderConfig(path=tmp_path / "all.csv", target="y", client_column="site"))
    assert tables["s"].columns["ort"].text.to_list() == ["Köln", "Ulm"]
    data = prepare_tables(tables, FolderConfig(path=tmp_path / "all.csv", target="y", client_column="site"), 0)
    (note,) = (note for note in data.notes if "UTF-8" in note)
    assert note.startswith('all.csv: not UTF-8; read as Windows-1252 (Latin-1), such as "Köln" in line 2;')
    (tmp_path / "all.csv").write_bytes(b"site,ort,y\nn,K\x81ln,2\n")  # no character of that encoding
    with pytest.raises(DataError, match=r"not UTF-8 \(byte 0x81 in line 2\)"):
        read_client_tables(FolderConfig(path=tmp_path / "all.csv", target="y", client_column="site"))
