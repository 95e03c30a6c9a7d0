"""The tutorial works as it stands, and what it says of its figures is so."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, run_page
from tests.small import one_after_the_other

PAGE = ROOT / "docs/tutorial.md"


def test_the_tutorial_runs_and_shows_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_after_the_other(monkeypatch)
    run_page(PAGE, monkeypatch)
    out, text = capsys.readouterr().out, PAGE.read_text(encoding="utf-8")
    dealt = re.findall(r"client-\d+ has of the digits.*", text)
    assert dealt
    assert dealt == re.findall(r"client-\d+ has of the digits.*", out)
    table = {row["algorithm"]: row for row in json.loads(Path("runs/first/table.json").read_text())}
    shown = re.findall(r"^ (\S+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+) %", text, re.MULTILINE)
    for name, *figures in shown[-len(table) :]:  # within what another processor may round differently
        row = table[name]
        found = [100 * row[key] for key in ("mean", "selected_mean", "worst_tenth", "hurt")]
        assert [float(f) for f in figures] == pytest.approx(found, abs=13), name  # an image is up to 8 points
        assert float(figures[0]) == pytest.approx(found[0], abs=3), name
    alone, common = table["Local"], table["FedAvg"]
    assert common["mean"] < alone["mean"] - 0.1
    assert common["hurt"] > 0.5
    for name in ("FedAvg+FT", "FedRep", "Learn2pFed-Net"):
        assert table[name]["mean"] > alone["mean"]
        assert table[name]["worst_tenth"] > alone["worst_tenth"]
    even = {row["algorithm"]: row for row in json.loads(Path("runs/even/table.json").read_text())}
    assert even["FedAvg"]["mean"] > even["Local"]["mean"] + 0.05
    assert even["FedAvg"]["hurt"] == 0
    for page in ("runs/first/report.html", "runs/first/learn2pfed-net-seed0/report.html"):
        assert Path(page).stat().st_size > 100_000
