"""Folders of CSV and Parquet files: what is read, what is inferred, and every error with its file and column."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedtailor.core.data import FederatedData
from fedtailor.data import load
from fedtailor.data.configs import FolderConfig
from fedtailor.errors import DataError

GOOD = "age,ward,sick\n" + "".join(f"{20 + i},{'AB'[i % 2]},{i % 2}\n" for i in range(12))


def folder(tmp_path: Path, **files: str | bytes) -> Path:
    """A folder with files given as name_ending=content."""
    path = tmp_path / "sites"
    path.mkdir()
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (path / name.replace("__", ".")).write_bytes(data)
    return path


def read(path: Path, target: str = "sick", seed: int = 0, **options: Any) -> FederatedData:
    return load(FolderConfig(path=path, target=target, **options), seed=seed)


def error(path: Path, target: str = "sick", **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, target, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rows_of(data: FederatedData, client: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a client, from train, val and test."""
    parts = [part.of(client) for part in (data.train, data.val, data.test)]
    return np.concatenate([x.numpy() for x, _ in parts]), np.concatenate([y.numpy() for _, y in parts])


def test_reads_clients_features_and_classes(tmp_path: Path) -> None:
    data = read(folder(tmp_path, b__csv=GOOD, a__csv=GOOD))
    assert data.clients == ("a", "b")
    assert data.features == ("age", "ward=A", "ward=B")
    assert (data.task, data.classes, data.outputs) == ("classification", ("0", "1"), 2)
    assert data.train.sizes.tolist() == [8, 8]
    x, y = rows_of(data, 0)
    assert len(x) == 12
    assert (x[:, 2] == y).all()  # ward B is where the sick are
    assert any("(inferred: 2" in note for note in data.notes)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_separators_and_bom(tmp_path: Path, separator: str, bom: bytes) -> None:
    content = bom + GOOD.replace(",", separator).replace("\n", "\r\n").encode()
    assert read(folder(tmp_path, a__csv=content)).features == ("age", "ward=A", "ward=B")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_as_spreadsheets_write_it(tmp_path: Path, encoding: str) -> None:
    content = GOOD.replace(",", "\t").encode(encoding)
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    assert read(folder(tmp_path, a__csv=mark + content)).features == ("age", "ward=A", "ward=B")


def test_bars_between_columns(tmp_path: Path) -> None:
    assert read(folder(tmp_path, a__csv=GOOD.replace(",", "|"))).features == ("age", "ward=A", "ward=B")


def test_wrong_separator_is_told(tmp_path: Path) -> None:
    message = error(folder(tmp_path, a__csv=GOOD, b__csv=GOOD.replace(",", " ")))
    assert re.search(r'b\.csv.*"sick".*"age ward sick"', message)
    assert "semicolon, tab or |" in message


DAYS = ["2024-02-28", "2024-03-01", "", "2024-02-28T12:00:00"]


def test_dates_are_days(tmp_path: Path) -> None:
    a = "when,y\n" + "".join(f"{day},{i % 2}\n" for i, day in enumerate(DAYS))
    b = "when,y\n28.2.2024,0\n01.03.2024,1\n28.2.2024,0\n"
    path = folder(tmp_path, a__csv=a, b__csv=b)
    import datetime

    days = [datetime.date(2024, 2, 28), datetime.date(2024, 3, 1), None]
    pl.DataFrame({"when": days, "y": [0, 1, 0]}).write_parquet(path / "c.parquet")
    data = read(path, "y", standardise="none")
    first = (datetime.date(2024, 2, 28) - datetime.date(1970, 1, 1)).days
    assert {*rows_of(data, 0)[0][:, 0].tolist()} >= {first, first + 2, first + 0.5}
    assert {*rows_of(data, 1)[0][:, 0].tolist()} == {first, first + 2}
    assert {*rows_of(data, 2)[0][:, 0].tolist()} >= {first, first + 2}
    assert any("1970-01-01" in note for note in data.notes)
    assert data.preparation is not None
    assert data.preparation.columns[0].model_dump()["is_date"]
    assert "when=2024-03-01" in read(path, "y", categorical=("when",)).features


def test_dates_that_cannot_be_used(tmp_path: Path) -> None:
    slashes = "when,y\n" + "03/04/2024,0\n04/05/2024,1\n" * 3
    message = error(folder(tmp_path, a__csv=slashes), "y")
    assert re.search(r'a\.csv.*"when".*"03/04/2024"', message)
    assert "data.ignore = ['when']" in message
    (tmp_path / "two").mkdir()
    path = folder(tmp_path / "two", a__csv="when,y\n2024-01-01,0\n2024-01-02,1\n", b__csv="when,y\n3,0\n4,1\n")
    assert re.search(r'b\.csv.*"when".*a\.csv', error(path, "y"))
    assert re.search(r'a\.csv.*"when"', error(path, "when"))
    (tmp_path / "bad").mkdir()
    path = folder(tmp_path / "bad", a__csv="when,y\n2024-02-30,0\n2024-01-02,1\n2024-01-03,1\n")
    assert '"2024-02-30" in data row 1' in error(path, "y")


def test_rows_without_a_target_are_left_out_and_told(tmp_path: Path) -> None:
    lines = GOOD.rstrip("\n").split("\n")
    gap = "\n".join([lines[0], lines[1].rpartition(",")[0] + ",", *lines[2:]]) + "\n"
    empty = lines[0] + "\n5,A,\n6,B,\n"
    data = read(folder(tmp_path, a__csv=GOOD, b__csv=gap, c__csv=empty))
    assert data.clients == ("a", "b")
    assert len(rows_of(data, 1)[1]) == len(rows_of(data, 0)[1]) - 1
    assert '3 rows without a value of "sick" are left out' in data.notes
    assert "left out, without any target: c" in data.notes


def test_wild_values_do_not_ruin_the_others(tmp_path: Path) -> None:
    for name in ("calm", "wild"):
        (tmp_path / name).mkdir()
    draw = np.random.default_rng(3)
    values = draw.normal(50, 10, size=(2, 60)).round(1)
    plain = {name: "age,y\n" + "".join(f"{v},{v / 2}\n" for v in each) for name, each in zip("ab", values, strict=True)}
    calm = read(folder(tmp_path / "calm", a__csv=plain["a"], b__csv=plain["b"]), target="y", task="regression")
    wild = plain["b"].replace(f"{values[1][0]},", "99999,", 1)
    found = read(folder(tmp_path / "wild", a__csv=plain["a"], b__csv=wild), target="y", task="regression")
    apart = (rows_of(found, 0)[0].std() / rows_of(calm, 0)[0].std()).item()
    # the limit is about 9 standard deviations away: one of 90 training rows there makes the spread sqrt(1 + 81 / 90)
    assert 1 / 1.45 < apart < 1.1
    (note,) = [note for note in found.notes if "far from all others" in note]
    assert 'column "age": 1 values' in note
    assert "b row 1 (99999)" in note


def test_a_target_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv="x,y\n1,1.5\n2,1e300\n3,2.5\n4,3.5\n")
    assert re.search(r'"y".*1e\+300.*\b2\b', error(path, target="y"))


ALL = "site," + GOOD.replace("\n", "\nn,", 6).replace("\n2", "\ns,2").replace("\n3", "\ns,3")


def test_one_file_with_a_column_that_names_the_client(tmp_path: Path) -> None:
    path = folder(tmp_path, all__csv=ALL)
    data = read(path / "all.csv", client_column="site")
    assert data.clients == ("n", "s")
    assert data.features == ("age", "ward=A", "ward=B")
    assert [len(rows_of(data, i)[1]) for i in range(2)] == [6, 6]
    assert re.search(r'all\.csv.*"sight".*"site"', error(path / "all.csv", client_column="sight"))
    assert "data.client_column is for one file" in error(path, client_column="site")
    assert "data.client_column" in error(path / "all.csv")
    (path / "all.csv").write_text(ALL + "west,1,A,0\n")
    alone = read(path / "all.csv", client_column="site")
    assert alone.clients == ("n", "s", "west")
    assert [len(rows.of(2)[0]) for rows in (alone.train, alone.val, alone.test)] == [1, 0, 0]
    (path / "all.csv").write_text(ALL + ",1,A,0\n")
    assert re.search(r'"site".*\b1\b.*\b13\b', error(path / "all.csv", client_column="site"))
    (path / "all.csv").write_text(ALL.replace("n,21,", "n,old,"))
    assert re.search(r'all\.csv\[n\].*"age".*"old".*\b2\b', error(path / "all.csv", client_column="site"))


def test_site_codes_are_kept_as_written(tmp_path: Path) -> None:
    codes = ["0012", "12", "12.0", "1E2", "100", "12345678901234567", "12345678901234568"]
    lines = [f"{code},{i},{i % 2}\n" for code in codes for i in range(4)]
    path = folder(tmp_path, all__csv="site,x,y\n" + "".join(lines)) / "all.csv"
    data = read(path, "y", client_column="site")
    assert data.clients == ("0012", "100", "12", "12345678901234567", "12345678901234568", "1E2")
    assert len(rows_of(data, 2)[1]) == 8  # 12 and 12.0 are one


def test_classes_are_kept_as_written(tmp_path: Path) -> None:
    lines = [f"{i},{code}\n" for i in range(4) for code in ("01", "1", "1.0", "2")]
    data = read(folder(tmp_path, a__csv="x,y\n" + "".join(lines)), "y")
    assert data.classes == ("01", "1", "2")
    assert np.bincount(rows_of(data, 0)[1]).tolist() == [4, 8, 4]
    path = folder(tmp_path / "sites", a__csv="x,y\n" + "".join(f"{i},0{i % 2 + 7}\n" for i in range(8)))
    assert read(path, "y").classes == ("07", "08")
    assert read(path, "y", task="regression", standardise_target=False).train.y.unique().tolist() == [7, 8]


def test_one_number_as_target_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv="x,y\n1,0.5\n2,0.5\n", b__csv="x,y\n1,0.5\n2,0.5\n")
    assert re.search(r'"y".*"0\.5"', error(path, "y"))
    (path / "b.csv").write_text("x,y\n1,0.5\n2,0.75\n")
    assert read(path, "y").task == "regression"


def test_a_million_rows_at_one_site(tmp_path: Path) -> None:
    path, rows = folder(tmp_path, small__csv=GOOD), 1_000_000
    each = np.arange(rows)
    frame = {"age": 20.0 + each % 50, "ward": np.array(["A", "B"])[each % 2], "sick": each % 2}
    pl.DataFrame(frame).write_csv(path / "large.csv")
    data = read(path, max_samples=1000)
    assert data.train.sizes.tolist() == [650, 8]
    assert any("large 1000000" in note for note in data.notes)


def test_decimal_comma_after_semicolons(tmp_path: Path) -> None:
    data = read(
        folder(tmp_path, a__csv="x;y\n1,5;2,25\n2,5;1,5\n3,5;9,5\n"), "y", standardise="none", standardise_target=False
    )
    x, y = rows_of(data, 0)
    assert sorted(x[:, 0].tolist()) == [1.5, 2.5, 3.5]
    assert sorted(y[:, 0].tolist()) == [1.5, 2.25, 9.5]


def test_parquet_and_gz_beside_csv(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv=GOOD, b__csv__gz=gzip.compress(GOOD.encode()))
    frame = pl.read_csv(path / "a.csv").with_columns(
        pl.col("age").cast(pl.Float32), pl.col("ward").cast(pl.Categorical)
    )
    frame.write_parquet(path / "c.parquet")
    (path / "notes.txt").write_text("not data")
    data = read(path, standardise="none")
    assert data.clients == ("a", "b", "c")
    assert [sorted(rows_of(data, i)[0][:, 0].tolist()) for i in range(3)] == [[20.0 + i for i in range(12)]] * 3


def test_categories_are_the_union_of_all_sites(tmp_path: Path) -> None:
    a = "c,x,y\nred,1,0\n,2,1\nred,3,0\n"
    b = "c,x,y\ngreen,1,0\ngreen,2,1\nblue,3,0\n"
    data = read(folder(tmp_path, a__csv=a, b__csv=b), "y")
    assert data.features == ("c=blue", "c=green", "c=red", "c=missing", "x")
    assert rows_of(data, 0)[0][:, :4].sum(0).tolist() == [0, 0, 2, 1]
    assert rows_of(data, 1)[0][:, :4].sum(0).tolist() == [1, 2, 0, 0]


def test_forced_categories_agree_on_how_numbers_are_written(tmp_path: Path) -> None:
    a, b = "code,y\n1.0,0\n2.0,1\n1.0,1\n", "code,y\n1,0\n10,1\n1,1\n"
    data = read(folder(tmp_path, a__csv=a, b__csv=b), "y", categorical=("code",))
    assert data.features == ("code=1", "code=2", "code=10")


def test_ignored_columns_are_gone(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv=GOOD, b__csv=GOOD.replace("ward", "room"))
    assert read(path, ignore=("ward", "room")).features == ("age",)


@pytest.mark.parametrize(
    ("values", "task", "why"),
    [
        (["yes", "no", "no", "yes"], "classification", "2 distinct texts"),
        (["true", "false", "true", "false"], "classification", "2 distinct texts"),
        (["1", "2", "3", "1"], "classification", "3 distinct whole numbers"),
        (["1.0", "2.0", "3.0", "1.0"], "classification", "3 distinct whole numbers"),
        (["1.5", "2", "3", "1"], "regression", "not whole numbers"),
        ([str(i) for i in range(30)], "regression", "30 distinct whole numbers"),
    ],
)
def test_task_is_inferred_and_told(tmp_path: Path, values: list[str], task: str, why: str) -> None:
    content = "x,y\n" + "".join(f"{i},{v}\n" for i, v in enumerate(values))
    data = read(folder(tmp_path, a__csv=content), "y")
    assert data.task == task
    assert any(why in note for note in data.notes)
    assert data.train.y.is_floating_point() == (task == "regression")
    assert data.train.y.ndim == (2 if task == "regression" else 1)


def test_configured_task_wins(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv="x,y\n1,1\n2,2\n3,1\n4,2\n")
    assert read(path, "y", task="regression").task == "regression"
    assert read(path, "y", task="classification").outputs == 2


def numbers(values: list[float | None]) -> str:
    return "x,y\n" + "".join(f"{'' if v is None else v},{i % 2}\n" for i, v in enumerate(values))


def test_missing_numbers_get_the_training_median_of_the_client(tmp_path: Path) -> None:
    x = {i: float(i * i) for i in range(8) if i != 5}
    a = "id,x,y\n" + "".join(f"{i},{x.get(i, '')},{i % 2}\n" for i in range(8))
    b = "id,x,y\n" + "".join(f"{i},,{i % 2}\n" for i in range(8))
    data = read(folder(tmp_path, a__csv=a, b__csv=b), "y", seed=2, standardise="none", test=0.4)
    ids = data.train.of(0)[0][:, 0].tolist()
    median = float(np.median([x[int(i)] for i in ids if i in x]))
    assert median != float(np.median(list(x.values())))  # else the test could not tell training rows from all
    filled = dict(rows_of(data, 0)[0].tolist())
    assert filled == x | {5: median}
    assert set(rows_of(data, 1)[0][:, 1].tolist()) == {median}  # has no value of its own: the pooled median
    assert any('column "x": 9 missing values' in note for note in data.notes)


def test_standardise_uses_training_rows(tmp_path: Path) -> None:
    files = {"a__csv": numbers([float(i) for i in range(40)]), "b__csv": numbers([float(100 + i) for i in range(20)])}
    path = folder(tmp_path, **files)
    pooled = read(path, "y").train.x[:, 0]
    assert pooled.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert pooled.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    by_client = read(path, "y", standardise="client")
    for i in range(2):
        x = by_client.train.of(i)[0][:, 0]
        assert x.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert x.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    raw = read(path, "y", standardise="none")
    train = raw.train.x[:, 0].double()
    test = (raw.test.x[:, 0].double() - train.mean()) / train.std(correction=0)
    assert np.allclose(read(path, "y").test.x[:, 0], test, atol=1e-5)


def test_constant_column_becomes_zero(tmp_path: Path) -> None:
    data = read(folder(tmp_path, a__csv=numbers([0.1] * 30)), "y")
    assert data.train.x.abs().max().item() < 1e-6


def test_columns_of_very_small_numbers_are_not_constant(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv=numbers([i * 1e-15 for i in range(40)]))
    assert read(path, "y").train.x.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    (path / "a.csv").write_text(numbers([1e-13 / 3] * 30))
    assert read(path, "y").train.x.abs().max().item() < 1e-6
    (path / "a.csv").write_text(numbers([0.0] * 30))
    assert read(path, "y").train.x.abs().max().item() == 0


def test_standardised_target(tmp_path: Path) -> None:
    content = "x,y\n" + "".join(f"{i},{i + 0.5}\n" for i in range(40))
    data = read(folder(tmp_path, a__csv=content), "y", standardise_target=True)
    assert data.train.y.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert any("target standardised" in note for note in data.notes)


def test_a_client_does_not_change_with_its_neighbours(tmp_path: Path) -> None:
    alone = read(folder(tmp_path, m__csv=GOOD), standardise="none")
    (tmp_path / "more").mkdir()
    both = read(folder(tmp_path / "more", a__csv=GOOD, m__csv=GOOD), standardise="none")
    assert alone.test.of(0)[0].equal(both.test.of(1)[0])
    assert alone.train.of(0)[0].equal(both.train.of(1)[0])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_blank_lines_are_skipped(tmp_path: Path, end: str) -> None:
    content = "\n" + GOOD.replace("\n30", "\n\n30") + "\n,,\nNA,,?\n\n"
    data = read(folder(tmp_path, a__csv=content.replace("\n", end)))
    assert data.features == ("age", "ward=A", "ward=B")
    assert len(rows_of(data, 0)[0]) == 12


def test_blank_lines_in_quotes_are_kept(tmp_path: Path) -> None:
    content = GOOD.replace(",A,", ',"A\n\nnew",')
    assert read(folder(tmp_path, a__csv=content)).features == ("age", "ward=A\n\nnew", "ward=B")


def test_old_line_ends_and_very_long_fields(tmp_path: Path) -> None:
    path = folder(tmp_path, old__csv=GOOD.replace("\n", "\r"))
    assert len(rows_of(read(path), 0)[0]) == 12
    note = "n" * 140_000
    (path / "old.csv").write_text(f"age,note,sick,last\n1,{note},0,\n2,b,1,4\n3,c,0,5\n4,d,1,6\n")
    data = read(path, ignore=("note",))
    assert len(rows_of(data, 0)[0]) == 4
    (path / "old.csv").write_text(f"age,note,sick,last\r1,{note},0,\r2,b,1\r3,c,0,5\r")
    assert re.search(r"old\.csv.*\b3\b.*\b3\b.*\b4\b", error(path))


def test_folder_errors(tmp_path: Path) -> None:
    assert "nowhere: no such folder" in error(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty: no data files" in error(tmp_path / "empty")
    (tmp_path / "x.csv").write_text(GOOD)
    assert "x.csv: is a file" in error(tmp_path / "x.csv")


BROKEN: dict[str, tuple[str | bytes, list[str]]] = {
    "empty": ("", ["b.csv", "empty file"]),
    "header only": ("age,ward,sick\n", ["b.csv", "no rows"]),
    "no target": (GOOD.replace("sick", "sikc"), ["b.csv", '"sick"', 'did you mean "sikc"?']),
    "misspelt column": (GOOD.replace("ward", "wrad"), ["b.csv", '"ward"', "a.csv has it", "data.ignore = ['ward']"]),
    "text among numbers": (
        GOOD.replace("\n21,", "\nold,"),
        ["b.csv", '"age"', '"old"', "data row 2", "data.categorical = ['age']", "data.ignore = ['age']"],
    ),
    "infinite": (GOOD.replace("\n21,", "\ninf,"), ["b.csv", '"age"', '"inf"', "data row 2"]),
    "duplicate column": ("age,ward,age,sick\n" + "1,A,2,0\n" * 3, ["b.csv", '"age"', "more than once"]),
    "nameless column": (",age,ward,sick\n" + "1,1,A,0\n" * 3, ["b.csv", "column 1 has no name"]),
    "no encoding": (GOOD.encode() + b"\x81", ["b.csv", "not UTF-8", "0x81", "line 14"]),
    "damaged utf-16": (GOOD.encode("utf-16")[:-1], ["b.csv", "damaged UTF-16"]),
    "utf-16 without mark": (GOOD.encode("utf-16-le"), ["b.csv", "not UTF-8"]),
    "too many fields": (GOOD + "1,A,0,9\n", ["b.csv", "line 14 has 4 fields, the header has 3"]),
    "too few fields": (GOOD + "1,A\n", ["b.csv", "line 14 has 2 fields, the header has 3"]),
    "open quote": (GOOD + '1,"A,0\n', ["b.csv"]),
    "odd target": (
        GOOD.replace("21,B,1", "21,B,maybe"),
        ["b.csv", '"sick"', '"maybe"', "data.task = 'classification'"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_named(tmp_path: Path, case: str) -> None:
    content, parts = BROKEN[case]
    message = error(folder(tmp_path, a__csv=GOOD, b__csv=content))
    for part in parts:
        assert part in message


def test_text_at_a_whole_site_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv=GOOD, b__csv=GOOD.replace("\n2", "\nz2").replace("\n3", "\nz3"))
    message = error(path)
    assert "b.csv" in message
    assert '"z20"' in message
    assert "age=z20" in read(path, categorical=("age",)).features


def test_text_in_a_regression_target(tmp_path: Path) -> None:
    message = error(folder(tmp_path, a__csv="x,y\n1,a\n2,b\n"), "y", task="regression")
    assert "a.csv" in message
    assert re.search(r'"y".*"a".*\b1\b', message)


def test_text_with_very_many_values(tmp_path: Path) -> None:
    content = "name,age,sick\n" + "".join(f"n{i},{i},{i % 2}\n" for i in range(60))
    path = folder(tmp_path, a__csv=content)
    data = read(path)
    assert data.features == ("age",)
    assert any(note.startswith("left out") and ": name" in note for note in data.notes)
    assert len(read(path, categorical=("name",)).features) == 61
    assert re.search(r'"name".*\b60\b', error(path, "name"))


def test_missing_values_as_errors(tmp_path: Path) -> None:
    message = error(folder(tmp_path, a__csv=numbers([1.0, 2, None, 4])), "y", missing="error")
    assert re.search(r'a\.csv.*"x".*\b1\b.*\b4\b', message)
    assert "data.missing = 'median'" in message


def test_column_without_any_value(tmp_path: Path) -> None:
    message = error(folder(tmp_path, a__csv=numbers([None] * 4)), "y")
    assert 'a.csv: column "x" has no value' in message
    assert "data.ignore = ['x']" in message


def test_options_that_name_no_column(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv=GOOD)
    assert "data.ignore = ['wart']: no file has this column; did you mean \"ward\"?" in error(path, ignore=("wart",))
    assert re.search(r"data\.categorical.*\['wart'\]", error(path, categorical=("wart",)))
    assert re.search(r"data\.ignore.*\['sick'\]", error(path, ignore=("sick",)))
    assert "no columns left" in error(path, ignore=("ward", "age"))


def test_one_class_is_an_error(tmp_path: Path) -> None:
    assert re.search(r'"y".*"1"', error(folder(tmp_path, a__csv="x,y\n1,1\n2,1\n"), "y"))


def test_two_files_of_one_client(tmp_path: Path) -> None:
    message = error(folder(tmp_path, a__csv=GOOD, a__tsv=GOOD))
    assert 'a.tsv: client "a" is also in a.csv' in message


def test_damaged_parquet_and_gz(tmp_path: Path) -> None:
    path = folder(tmp_path, a__csv=GOOD)
    pl.read_csv(path / "a.csv").write_parquet(path / "b.parquet")
    whole = (path / "b.parquet").read_bytes()
    (path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    assert "b.parquet: truncated or corrupt" in error(path)
    (path / "b.parquet").unlink()
    (path / "b.csv.gz").write_bytes(gzip.compress(GOOD.encode())[:-12])
    assert "b.csv.gz" in error(path)


def test_parquet_column_of_a_strange_type(tmp_path: Path) -> None:
    path = folder(tmp_path)
    pl.DataFrame({"age": [1, 2], "when": [[1], [2]], "sick": [0, 1]}).write_parquet(path / "a.parquet")
    message = error(path)
    assert re.search(r'a\.parquet.*"when"', message)
    assert read(path, ignore=("when",)).features == ("age",)
