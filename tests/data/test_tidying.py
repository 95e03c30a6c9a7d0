"""Tables as people keep them: what is recognised, what is told, and what is asked about."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedtailor.cli.check_command import as_options
from fedtailor.core.data import FederatedData
from fedtailor.data import load
from fedtailor.data.configs import FolderConfig
from fedtailor.data.tabular.problems import find_problems
from fedtailor.data.tabular.read import read_table, table_from_frame
from fedtailor.errors import DataError


def folder(tmp_path: Path, **frames: dict[str, list[object]]) -> Path:
    (tmp_path / "sites").mkdir()
    for name, columns in frames.items():
        pl.DataFrame(columns).write_csv(tmp_path / "sites" / f"{name}.csv")
    return tmp_path / "sites"


def read(path: Path, target: str = "y") -> FederatedData:
    return load(FolderConfig(path=path, target=target, standardise="none"), seed=0)


Y: list[object] = [0, 1] * 12


@pytest.mark.parametrize(
    ("written", "numbers", "is_date"),
    [
        (["$1,200", "$15", "$-3.5"], [1200, 15, -3.5], False),
        (["45%", "3 %"], [45, 3], False),
        (["1,5", "2", "12,25"], [1.5, 2, 12.25], False),
        (["9 Mar 2024", "1 Jan 1970"], [19791, 0], True),
        (["March 9, 2024"], [19791], True),
        (["20240309", "20240310", "19700101"], [19791, 19792, 0], True),
        (["12345678", "20240310", "19700101"], [12345678, 20240310, 19700101], False),
    ],
)
def test_numbers_and_dates_as_people_write_them(written: list[str], numbers: list[float], is_date: bool) -> None:
    column = table_from_frame(Path("rows"), pl.DataFrame({"x": written})).columns["x"]
    assert column.number.to_list() == numbers
    assert column.is_date == is_date


def test_eight_digits_are_a_date_where_others_write_dates(tmp_path: Path) -> None:
    path = folder(tmp_path, a={"when": ["9 Mar 2024"] * 24, "y": Y}, b={"when": [20240310] * 2, "y": [0, 1]})
    found = read(path)
    assert set(found.train.of(1)[0][:, 0].tolist()) == {19792.0}
    assert set(found.train.of(0)[0][:, 0].tolist()) == {19791.0}


def test_numbers_in_doubt_are_asked_about(tmp_path: Path) -> None:
    path = folder(tmp_path, a={"x": ["1,200", "2,300"] * 12, "y": Y})
    with pytest.raises(DataError, match=r'a.csv.*"x".*"1,200".*\b1200\b.*1.200'):
        read(path)
    (tmp_path / "two").mkdir()
    path = folder(tmp_path / "two", a={"x": ["45%", "3%"] * 12, "y": Y}, b={"x": [0.45, 0.03] * 12, "y": Y})
    with pytest.raises(DataError, match=r'b.csv.*"x".*a.csv'):
        read(path)


def test_names_and_classes_in_other_capitals_are_one(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        a={"Age": list(range(24)), "y": ["well", "ill"] * 12},
        b={"age": list(range(24)), "y": ["Well", "ill "] * 12},
        c={"age": list(range(24)), "y": ["well", "ill"] * 12},
    )
    data = read(path)
    assert data.features == ("age",)
    assert data.classes == ("ill", "well")
    assert 'column "Age" at a is read as "age"' in data.notes
    assert 'column "y": "Well" is read as "well"' in data.notes


def test_ordinary_categories_of_numbers_and_texts(tmp_path: Path) -> None:
    data = read(folder(tmp_path, a={"kids": ["0", "1", "3+"] * 8, "x": [0.5] * 24, "y": Y}))
    assert data.features == ("kids=0", "kids=1", "kids=3+", "x")
    assert any(re.search(r'"kids".*\b0\b.*\b1\b.*3\+', note) for note in data.notes)


def test_ids_are_left_out(tmp_path: Path) -> None:
    x: list[object] = [i / 7 for i in range(24)]
    data = read(
        folder(tmp_path, a={"patient_id": list(range(24)), "PatientID": [f"p{i}" for i in range(24)], "x": x, "y": Y})
    )
    assert data.features == ("x",)


def test_very_many_texts_count_by_what_the_target_is_like(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    towns, level = rng.integers(60, size=(2, 400)), rng.normal(size=60)
    y = level[towns] + rng.normal(scale=0.3, size=(2, 400))
    frames = {name: {"town": [f"t{t}" for t in towns[i]], "y": y[i].tolist()} for i, name in enumerate("ab")}
    data = read(folder(tmp_path, **frames))
    assert data.features == ("town (mean y)",)
    assert data.preparation is not None
    target = data.preparation.target
    train = [in_training("ab"[i], y[i], data) for i in range(2)]
    own = np.concatenate([(y[i][train[i]] - target.mean) / target.sd for i in range(2)])
    at = np.concatenate([towns[i][train[i]] for i in range(2)])
    wanted = own[at == 7].sum() / ((at == 7).sum() + 10)  # ten rows of mean 0 beside its own
    seen, never = data.preparation.encode("a", {}, {"town": ["t7", "never seen"]}, "rows")[:, 0].tolist()
    assert (seen, never) == (pytest.approx(wanted), 0.0)
    x, z = data.train.x[:, 0].numpy(), data.train.y[:, 0].numpy()
    assert np.corrcoef(x, z)[0, 1] > 0.8


def in_training(site: str, y: np.ndarray, data: FederatedData) -> np.ndarray:
    """Which rows of a site are for training."""
    assert data.preparation is not None
    own = data.preparation.target.readable(data.train.of(data.clients.index(site))[1])[:, 0].numpy()
    return np.isin(y.round(9), own.round(9))


def test_statistics_of_training_rows_do_not_know_their_targets(tmp_path: Path) -> None:
    """Texts that say nothing must not look as if they did."""
    rng = np.random.default_rng(1)
    frames = {
        name: {"town": [f"t{t}" for t in rng.integers(150, size=600)], "y": rng.integers(2, size=600).tolist()}
        for name in "ab"
    }
    data = read(folder(tmp_path, **frames))
    assert data.features == ("town (log-odds of 1)",)
    assert abs(np.corrcoef(data.train.x[:, 0].numpy(), data.train.y.numpy())[0, 1]) < 0.1


def test_a_column_that_a_site_does_not_have(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        a={"x": list(range(24)), "chol": [200.0] * 24, "ward": ["n", "s"] * 12, "y": Y},
        b={"x": list(range(24)), "y": Y},
    )
    data = read(path)
    assert data.train.of(1)[0][:, 1].unique().tolist() == [200.0]
    assert "ward=missing" in data.features
    assert any('column "chol" is missing at b' in note for note in data.notes)
    assert data.preparation is not None
    assert [column.absent for column in data.preparation.columns] == [(), ("b",), ("b",)]


def test_sampling_is_said_loudly(tmp_path: Path) -> None:
    path = folder(tmp_path, a={"x": list(range(24)), "y": Y})
    data = load(FolderConfig(path=path, target="y", max_samples=10), seed=0)
    assert any(note.startswith("NOT ALL ROWS ARE USED: 10 drawn at random at a (24 rows)") for note in data.notes)


def test_all_problems_of_all_files_at_once(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        a={"x": ["old", *map(str, range(23))], "when": ["03/04/2024"] * 24, "y": Y},
        b={"x": list(range(24)), "when": ["05/04/2024"] * 24, "yy": Y},
        c={"x": ["?", "young", *map(str, range(22))], "when": ["2024-01-02"] * 24, "y": Y},
    )
    (path / "d.csv").write_text("")
    found, _ = find_problems(FolderConfig(path=path, target="y"))
    for part in ('a.csv: column "x" has the text "old"', 'c.csv: column "x" has the text "young"'):
        assert sum(part in words for words in found) == 1
    assert sum(bool(re.search(r'a\.csv.*"when"', words)) for words in found) == 1
    assert sum('b.csv: no target column "y"' in words for words in found) == 1
    assert sum("d.csv: empty file" in words for words in found) == 1
    assert find_problems(FolderConfig(path=folder_of_good(tmp_path), target="y"))[0] == []


def test_columns_that_a_fit_takes_are_no_problem(tmp_path: Path) -> None:
    texts = [f"text {i % 60}" for i in range(240)]
    path = folder(tmp_path, a={"x": [*range(240)], "words": [*texts], "code": [*texts], "y": Y * 10})
    assert find_problems(FolderConfig(path=path, target="y", categorical=("code",)))[0] == []


def folder_of_good(tmp_path: Path) -> Path:
    (tmp_path / "good").mkdir()
    return folder(tmp_path / "good", a={"x": list(range(24)), "y": Y})


def test_remedies_in_words_of_the_command_line() -> None:
    said = as_options("leave it out with data.ignore = ['x'] or set data.task = 'classification'")
    assert said == "leave it out with --set 'data.ignore=[\"x\"]' or --set 'data.task=classification'"


def test_names_that_look_like_a_compressed_file_are_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x^2,y\n1,2\n3,4\n")  # "x^" begins a zlib stream
    table = read_table(tmp_path / "t.csv")
    assert (table.names, table.rows) == (("x^2", "y"), 2)
