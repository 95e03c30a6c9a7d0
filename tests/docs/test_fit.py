"""The page on fitting works as it stands, and what it says of settings is what the code has."""

import json
import re
from pathlib import Path

import polars as pl
import pytest

from fedtailor.tables import fit_sources
from fedtailor.tables import model_selection as choice
from tests.docs.pages import ROOT, run_page

PAGE = ROOT / "docs/how-to/fit.md"


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(PAGE, monkeypatch)
    out = capsys.readouterr().out
    assert "report     runs/sites/report.html" in out
    assert "wrote north.pt2\nwrote north.preparation.json" in out
    assert "model      runs/sites/" in out
    assert {"prediction", "probability ill", "probability well"} <= set(pl.read_csv("predicted.csv").columns)
    features = json.loads(Path("north.preparation.json").read_text(encoding="utf-8"))["features"]
    assert f"# {', '.join(features)}; standardised" in PAGE.read_text(encoding="utf-8")


def test_after_the_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs/how-to/after-fit.md"
    run_page(page, monkeypatch)
    out = capsys.readouterr().out
    assert "wrote north.json" in out
    assert "models     runs/clinics/update-1" in out
    assert "wrote more-predicted.csv: 40 rows" in out
    record = json.loads(Path("north.json").read_text(encoding="utf-8"))
    shown = page.read_text(encoding="utf-8")
    for key in (*record, *(key for column in record["columns"] for key in column)):
        assert f"`{key}`" in shown or key in ("how", "prediction", "name", "kind", "unit")


def test_what_is_settled_is_as_the_page_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.search(rf"`--rounds` .*\b{fit_sources.ROUNDS}\b", text.replace("\n", " "))
    assert f"at most {fit_sources.MOST_ROWS:,} are used".replace(",", " ") in text
    assert f"by {choice.CAUTION['error']:g} standard errors in the squared error" in text
    assert choice.CAUTION["metric"] == 0
