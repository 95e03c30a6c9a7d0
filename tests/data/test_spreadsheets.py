"""Names that a spreadsheet would take for formulas."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from fedtailor.data.files import escape_formula
from fedtailor.serving.predict import write_frame


@pytest.mark.parametrize("name", ['=HYPERLINK("http://x")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\tx", "\r=1"])
def test_a_formula_is_text(name: str) -> None:
    assert escape_formula(name) == f"'{name}"


@pytest.mark.parametrize("name", ["north", "-1", "+2.5", "-1e3", "a=b", ""])
def test_names_and_numbers_stay(name: str) -> None:
    assert escape_formula(name) == name


def test_predicted_classes_are_no_formulas_and_rows_stay_as_they_were(tmp_path: Path) -> None:
    frame = pl.DataFrame({"note": ["=1", "b"], "prediction": ["=2+3", "-1"]})
    write_frame(tmp_path / "out.csv", frame)
    assert (tmp_path / "out.csv").read_text() == "note,prediction\n=1,b\n".replace("=1,b\n", "=1,'=2+3\nb,-1\n")
