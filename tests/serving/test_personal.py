"""Predicting with a personal model: rows that come later are prepared, and answered, as in the run."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from fedtailor.data.tabular.read import read_rows, read_table, table_from_frame
from fedtailor.errors import DataError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import RunFolder
from fedtailor.serving.onboard import onboard
from fedtailor.serving.predict import predict_file, write_frame
from fedtailor.tables.serve import personal
from tests.made_sites import make_sites
from tests.small import config, stop_after

HEAD = "a,b,ward\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of FedRep at three sites, which need not be there any more."""
    folder = tmp_path_factory.mktemp("run")
    sites = make_sites(folder / "sites", sites=3)
    text = (sites / "s1.csv").read_text().splitlines()
    text[1:4] = [",".join(["", *line.split(",")[1:]]) for line in text[1:4]]  # missing numbers
    (sites / "s1.csv").write_text("\n".join(text) + "\n")
    tables = {"rounds": 2, "model": {"hidden": [4]}, "data": {"source": "folder", "target": "outcome"}}
    tables["data"] |= {"path": str(sites), "standardise": "client"}  # type: ignore[operator]
    runner.start(parse(tables), folder / "run")
    return folder / "run"


def test_all_rows_of_a_site_get_what_the_run_gave_them(run: Path) -> None:
    folder = RunFolder(run)
    setting = runner.reload_experiment(folder)
    for i, site in enumerate(setting.data.clients):
        own = personal(run, site)
        x = own.encode(read_table(run.parent / "sites" / f"{site}.csv"))
        trained = torch.cat([part.of(i)[0] for part in (setting.data.train, setting.data.val, setting.data.test)])
        assert torch.equal(x.sort(0).values, trained.sort(0).values)
        test_x, test_y = setting.data.test.of(i)
        right = (own.outputs(test_x).argmax(1) == test_y).double().mean()
        assert folder.results is not None
        assert float(right) == folder.results["selected"]["clients"]["accuracy"][i]


def test_rows_of_a_frame(run: Path) -> None:
    own = personal(run, "s0")
    rows = {"a": [3.0, None], "b": [-3.0, 0.0], "ward": ["north", None], "more": [1, 2]}
    chances = own.predict_proba(rows)
    assert chances.shape == (2, 2)
    assert np.allclose(chances.sum(1), 1)
    assert own.predict(pl.DataFrame(rows)).tolist() == [own.classes[i] for i in chances.argmax(1)]
    assert "no site of the run has" in own.notes[0]  # nobody has a missing ward
    assert repr(own) == "Personal(s0: FedRep, classes ill, well)"


def test_missing_numbers_get_the_median_of_the_site(run: Path) -> None:
    for site in ("s0", "s1"):
        own = personal(run, site)
        assert own.preparation is not None
        column = own.preparation.columns[0].model_dump()
        median = column["sites"][site]["median"]
        chances = own.predict_proba({"a": [None, median], "b": [1.0, 1.0], "ward": ["north", "north"]})
        assert np.array_equal(chances[0], chances[1])
        assert list(column["sites"]) == [site]


def write(folder: Path, text: str, name: str = "new.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_file_keeps_its_columns(run: Path, tmp_path: Path) -> None:
    file = write(tmp_path, "id,ward,b,a\nx1,north,-2,1\nx2,west,1,?\n")
    own = personal(run, "s0")
    frame = predict_file(own, file)
    assert frame.columns == ["id", "ward", "b", "a", "prediction", "probability ill", "probability well"]
    assert frame["id"].to_list() == ["x1", "x2"]
    assert frame["prediction"][0] == "ill"
    assert own.notes == [
        f'{file}: column "ward": 1 rows have values such as "west", which no site of the run has; '
        "they count as none of the known ones"
    ]
    write_frame(tmp_path / "out.parquet", frame)
    assert pl.read_parquet(tmp_path / "out.parquet").equals(frame)
    write_frame(tmp_path / "out.csv", frame)
    assert pl.read_csv(tmp_path / "out.csv")["prediction"].to_list() == frame["prediction"].to_list()


def test_every_row_comes_back_as_it_was_written(run: Path, tmp_path: Path) -> None:
    lines = ["id;country;a;b;ward", "007;NA;1,5;2;north", ";;;;", "", "?;NA;NA;;", "1,20;  x;;1.0;south", ';"";;;']
    file = write(tmp_path, "\n".join(lines))
    own = personal(run, "s0")
    frame = predict_file(own, file)
    assert frame["id"].to_list() == ["007", None, "?", "1,20", None]
    assert frame["country"].to_list() == ["NA", None, "NA", "  x", ""]
    assert frame["a"].to_list() == ["1,5", None, "NA", None, None]
    rows = {"a": [1.5, None, None, None, None], "b": [2, None, None, 1, None]}
    wards = ["north", None, None, "south", None]
    assert frame["prediction"].to_list() == own.predict(rows | {"ward": wards}).tolist()
    write_frame(tmp_path / "out.csv", frame)
    written = (tmp_path / "out.csv").read_text().splitlines()
    assert written[1].startswith('007,NA,"1,5",2,north,')
    assert written[2].startswith(",,,,,")
    assert len(predict_file(own, tmp_path / write(tmp_path, HEAD + ",,\nNA,,\n"))) == 2


def test_columns_that_the_model_does_not_use_do_not_matter(run: Path, tmp_path: Path) -> None:
    rows = {"a": [1.0, None], "b": [2.0, 3.0], "ward": ["north", "south"]}
    others = {"l": [[1], None], "d": [timedelta(1), None], "s": [{"x": 1}, None], "r": [b"r", None], "e": [None] * 2}
    pl.DataFrame(rows | others).write_parquet(tmp_path / "new.parquet")
    own = personal(run, "s0")
    frame = predict_file(own, tmp_path / "new.parquet")
    assert (
        frame["prediction"].to_list() == own.predict(rows).tolist() == own.predict(pl.DataFrame(rows | others)).tolist()
    )
    write_frame(tmp_path / "out.parquet", frame)
    assert pl.read_parquet(tmp_path / "out.parquet").equals(frame)
    write_frame(tmp_path / "out.csv", frame)
    assert pl.read_csv(tmp_path / "out.csv")["l"].to_list() == ["[1]", None]
    with pytest.raises(DataError, match=r'"ward".*"wards"'):
        own.predict({"a": [1], "b": [1], "wards": ["north"]})


def test_what_is_written_follows_from_the_ending(tmp_path: Path) -> None:
    frame = pl.DataFrame({"x": ["a,b", "c"], "prediction": [0.5, 1.5]})
    for name in ("o.csv", "o.tsv", "o.csv.gz", "o.tsv.gz", "o.parquet", "O.PARQUET"):
        write_frame(tmp_path / name, frame)
        back = table_from_frame(tmp_path, read_rows(tmp_path / name)[0]).columns
        assert back["x"].text.to_list() == ["a,b", "c"]
        assert back["prediction"].number.to_list() == [0.5, 1.5]
    assert (tmp_path / "o.tsv").read_text().startswith("x\tprediction\na,b\t0.5\n")
    for name in ("o.json", "o.xlsx", "o", "o.gz"):
        with pytest.raises(RunError, match=f"{name}: cannot be written; known endings: .csv, .tsv, "):
            write_frame(tmp_path / name, frame)
        assert not (tmp_path / name).exists()


def test_classes_with_leading_zeros_stay_text(run: Path) -> None:
    own = personal(run, "s0")
    assert replace(own, classes=("0", "1")).labels.tolist() == [0, 1]
    assert replace(own, classes=("01", "1")).labels.tolist() == ["01", "1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,ward\n1,north\n", 'new.csv: no column "b", which the model needs'),
        (HEAD + "1,much,north\n", 'column "b" has the text "much" in data row 1 where a number is expected'),
        (HEAD + "2024-01-01,1,north\n", 'column "a" has dates, in the run it had numbers'),
        (HEAD, "has a header but no rows"),
        ("", "empty file"),
        ("a,b,ward,prediction\n1,1,north,0\n", 'has a column "prediction" already; rename or remove it'),
        ("a,b,ward\n1,1\n", "line 2 has 2 fields, the header has 3"),
    ],
)
def test_files_that_are_refused(run: Path, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        predict_file(personal(run, "s0"), write(tmp_path, text))
    assert "new.csv: " in str(caught.value)
    assert message in str(caught.value)


def test_other_mistakes(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match='no site "s9"; known: s0, s1, s2'):
        personal(run, "s9")
    with pytest.raises(DataError, match="not a data file"):
        predict_file(personal(run, "s0"), write(tmp_path, "x", "new.xls"))
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("rounds=3"), tmp_path / "half", None, stop_after(1))
    with pytest.raises(RunError, match="fedtailor resume"):
        personal(tmp_path / "half", "client-00")


def test_numbers_come_in_units_of_the_target(tmp_path: Path) -> None:
    sites = make_sites(tmp_path / "sites", sites=2, outlier=False, numbers=True)
    tables = {"rounds": 6, "model": {"name": "linear"}, "algorithm": {"name": "learn2pfed"}}
    runner.start(
        parse(tables | {"data": {"source": "folder", "path": str(sites), "target": "outcome"}}), tmp_path / "r"
    )
    rows = pl.read_csv(sites / "s1.csv")
    found = personal(tmp_path / "r", "s1").predict(rows)
    wanted = rows["outcome"].to_numpy()
    assert np.sqrt(((found - wanted) ** 2).mean()) < 6 < wanted.std()
    with pytest.raises(DataError, match="predicts a number"):
        personal(tmp_path / "r", "s1").predict_proba(rows)


def test_dates_are_prepared_as_in_the_run(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for site in "ab":
        lines = [f"2024-01-{i + 1:02d},{i % 2}" for i in range(20)]
        (tmp_path / f"sites/{site}.csv").write_text("\n".join(["when,y", *lines]) + "\n")
    tables = {"rounds": 1, "model": {"name": "linear"}, "algorithm": {"name": "local"}}
    runner.start(
        parse(tables | {"data": {"source": "folder", "path": str(tmp_path / "sites"), "target": "y"}}), tmp_path / "r"
    )
    own = personal(tmp_path / "r", "a")
    chances = own.predict_proba({"when": ["2024-01-05", "05.01.2024"][:1]})
    assert np.array_equal(chances, own.predict_proba({"when": ["5.1.2024"]}))
    assert own.predict({"when": ["2024-01-05"]}).dtype.kind == "i"
    with pytest.raises(DataError, match=r"numbers.* dates"):
        own.predict({"when": [3]})


def test_samples_that_are_no_tables_come_as_an_array(tmp_path: Path) -> None:
    folder = runner.start(config("rounds=1"), tmp_path / "digits")
    own = personal(tmp_path / "digits", "client-01")
    x, _ = runner.reload_experiment(folder).data.test.of(1)
    np.savez(tmp_path / "x.npz", x=x.numpy())
    frame = predict_file(own, tmp_path / "x.npz")
    assert frame["prediction"].to_list() == [str(i) for i in own.outputs(x).argmax(1).tolist()]
    assert own.predict(x).tolist() == own.outputs(x).argmax(1).tolist()
    np.savez(tmp_path / "y.npz", x=x.flatten(1).numpy()[:, :3])
    with pytest.raises(DataError, match="do not fit the model"):
        predict_file(own, tmp_path / "y.npz")
    with pytest.raises(DataError, match="this run does not read tables"):
        predict_file(own, write(tmp_path, "a,b\n1,2\n"))


def test_a_newcomer_predicts_with_its_own_medians(run: Path, tmp_path: Path) -> None:
    lines = [f"{5 + i / 10},{i % 3},north,{'ill' if i % 2 else 'well'}" for i in range(20)]
    file = write(tmp_path, "\n".join(["a,b,ward,outcome", *lines]) + "\n")
    onboard(run, file, "late")
    own = personal(run, "late")
    assert own.preparation is not None
    assert 5 < own.preparation.columns[0].model_dump()["sites"]["late"]["median"] < 7
    assert len(own.predict(pl.read_csv(file))) == 20


@pytest.mark.data
def test_a_zero_that_means_missing_does_so_later(tmp_path: Path) -> None:
    tables = {"rounds": 1, "model": {"name": "linear"}, "data": {"source": "heart-disease"}}
    runner.start(parse(tables), tmp_path / "heart")
    own = personal(tmp_path / "heart", "va")
    assert own.preparation is not None
    row = {c.name: [1.0] if c.kind == "number" else ["1"] for c in own.preparation.columns}
    assert np.array_equal(own.predict_proba(row | {"chol": [0]}), own.predict_proba(row | {"chol": [None]}))
    assert own.predict(row)[0] in ("absent", "present")
