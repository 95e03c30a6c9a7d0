"""The page of a fit: sites, what is shared, who was dropped, and the runs behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.experiments.store import FIT, RunFolder, read_json, write_json
from fedtailor.report.fit_page import fit_page
from fedtailor.report.run_page import run_page
from fedtailor.report.write import page_of, write
from fedtailor.tables import fit, halving
from tests.made_sites import make_sites


def test_page_of_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halving, "NETWORK", ({"name": "fedper"}, {"name": "ditto"}))
    sites = make_sites(tmp_path / "<sites>", sites=3, rows=40)
    source = {"source": "folder", "path": str(sites), "target": "outcome"}
    out = tmp_path / "out"
    record = fit.fit(source, out, rounds=4, values={"model.name": "mlp", "model.hidden": [4]})
    page = fit_page(out)
    assert (page.kind, page.finished, page.title) == ("Fit", True, "Personal models for <sites>")
    by_id = {section.id: section for section in page.sections}
    rows = by_id["sites"].tables[0].rows
    assert [row[0].text for row in rows] == ["s0", "s1", "s2"]
    assert [row[4].key for row in rows] == [r["personal"] for r in record["sites"].values()]
    gains = [r["personal"] - r["alone"] for r in record["sites"].values()]
    drawn = [[row[1] for row in chart.rows] for chart in by_id["sites"].charts]
    assert drawn == ([gains] if any(gains) else [])  # bars of zero are no chart
    assert [row[0].text for row in by_id["halving"].tables[0].rows] == [d["label"] for d in record["dropped"]]
    assert len(record["dropped"]) == 1
    assert {row[0].text for row in by_id["shared"].tables[0].rows} == set(record["shared"])
    names = {row[0].text for row in by_id["task"].tables[0].rows}
    assert names == {"Local", "FedAvg", "FedPer", "Ditto"} - {d["label"] for d in record["dropped"]}
    text = write(out).read_text(encoding="utf-8")
    assert "&lt;sites&gt;" in text
    assert "<sites>" not in text.split("<script")[0]
    (out / "fedavg-seed0/config.toml").write_text("rounds = 5\n")
    said = [text for text in fit_page(out).sections[0].text if "left out" in text]
    assert said[0].startswith("1 run cannot be read and is left out; the first: ")
    assert "config.toml: changed" in said[0]
    write_json(out / FIT, {"settings": record["settings"]})  # not finished: a page on the runs that there are
    assert page_of(out).kind == "Comparison"


def test_a_number_is_told_with_its_units(tmp_path: Path) -> None:
    sites = make_sites(tmp_path / "sites", sites=2, rows=30, numbers=True)
    values = {"model.name": "linear"}
    fit.fit({"path": str(sites), "target": "outcome"}, tmp_path / "out", rounds=2, values=values)
    by_id = {section.id: section for section in fit_page(tmp_path / "out").sections}
    prepared = RunFolder(tmp_path / "out" / "local-seed0").preparation
    assert prepared is not None
    note = f"Errors here are in standard deviations of outcome: 1 is {prepared.target.sd:.6g}."
    assert "in the units of outcome" in by_id["sites"].text[0]
    for name in ("halving", "task", "gain"):
        assert by_id[name].text == (note,)
    assert note in run_page(tmp_path / "out" / "local-seed0").sections[0].text


def test_record_is_what_was_returned(tmp_path: Path) -> None:
    sites = make_sites(tmp_path / "sites", sites=1, rows=30)
    record = fit.fit({"path": str(sites), "target": "outcome"}, tmp_path / "out", rounds=1)
    assert read_json(tmp_path / "out" / FIT) == record
    assert "s0" in write(tmp_path / "out").read_text(encoding="utf-8")
