"""The data of one site: a table read with what the sites agreed on, or prepared rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.data import load
from fedtailor.data.configs import FolderConfig, SitesConfig
from fedtailor.data.sources.site_data import SiteData, load_site, write_prepared
from fedtailor.errors import DataError
from tests.helpers import make_data

ROWS = "age,arm,outcome\n50,a,ill\n60,b,well\n,a,well\n40,c,ill\n55,a,well\n45,b,ill\n62,c,well\n"


def described(path: Path, **changes: Any) -> SiteData:
    tables: dict[str, Any] = {
        "path": path,
        "target": "outcome",
        "classes": ("ill", "well"),
        "numeric": ("age",),
        "categories": {"arm": ("a", "b", "c")},
    }
    return SiteData(**(tables | changes))


def test_a_site_reads_its_table_as_a_folder_of_all_sites_would(tmp_path: Path) -> None:
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text(ROWS if name == "north" else ROWS.replace("50,a", "51,a"))
    together = load(FolderConfig(path=tmp_path, target="outcome", standardise="client"), seed=4)
    for i, name in enumerate(("north", "south")):
        alone = load_site(described(tmp_path / f"{name}.csv"), name, seed=4)
        assert alone.features == together.features
        assert alone.classes == together.classes
        for split in ("train", "val", "test"):
            for mine, theirs in zip(getattr(alone, split).of(0), getattr(together, split).of(i), strict=True):
                assert torch.equal(mine, theirs)


def test_prepared_rows_come_back_as_they_were(tmp_path: Path) -> None:
    data = make_data()
    write_prepared(tmp_path / "rows.safetensors", data, 2)
    back = load_site(SiteData(path=tmp_path / "rows.safetensors"), "cy", seed=0)
    assert (back.task, back.outputs, back.clients) == (data.task, data.outputs, ("cy",))
    for split in ("train", "val", "test"):
        for mine, theirs in zip(getattr(back, split).of(0), getattr(data, split).of(2), strict=True):
            assert torch.equal(mine, theirs)


def test_numbers_that_are_missing_can_be_filled(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROWS)
    data = load_site(described(tmp_path / "a.csv", fill={"age": 7}, standardise="none", test=0, val=0), "a", seed=0)
    assert data.train.x[:, 0].tolist() == [50, 60, 7, 40, 55, 45, 62]


def test_a_number_to_predict_is_scaled_as_agreed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,10\n2,20\n3,30\n")
    changes: dict[str, Any] = {"target": "y", "classes": (), "numeric": ("x",), "categories": {}}
    data = load_site(described(tmp_path / "a.csv", **changes, target_scale=(20, 10), test=0, val=0), "a", seed=0)
    assert data.task == "regression"
    assert data.train.y[:, 0].tolist() == [-1, 0, 1]


def test_classes_with_leading_zeros_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,01\n2,1\n3,1.0\n")
    changes: dict[str, Any] = {"target": "y", "classes": ("1", "01"), "numeric": ("x",), "categories": {}}
    assert load_site(described(tmp_path / "a.csv", **changes, test=0, val=0), "a", seed=0).train.y.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target": "outcom"}, 'no column "outcom"; did you mean "outcome"?'),
        ({"classes": ("ill",)}, 'target column "outcome" has the class "well", which is not among data.classes'),
        ({"categories": {"arm": ("a", "b")}}, 'column "arm" has the value "c"'),
        ({"numeric": ("arm",)}, 'column "arm" has the text "a"'),
        ({"numeric": (), "categories": {}}, "a table needs data.target, and data.numeric or"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROWS)
    with pytest.raises(DataError, match=why.replace("?", r"\?").replace("[", r"\[")):
        load_site(described(tmp_path / "a.csv", **changes), "a", seed=0)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "rows.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="not prepared rows"):
        load_site(SiteData(path=tmp_path / "rows.safetensors"), "a", seed=0)
    with pytest.raises(DataError, match="not a data file"):
        load_site(described(tmp_path / "a.txt"), "a", seed=0)


def test_the_data_of_sites_is_not_here() -> None:
    with pytest.raises(DataError, match="fedtailor federation submit"):
        load(SitesConfig(), seed=0)
