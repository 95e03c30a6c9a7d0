"""What matters and what is shared, on the page of a fit: from its effects, and worded for one, two or many sites."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedtailor.experiments.store import read_json, write_json
from fedtailor.report.fit_page import by_size, caterpillar, fairness, fit_page, headline, served_sentence, who
from fedtailor.tables import fit as fitting
from fedtailor.tables.effects import EFFECTS
from tests.made_sites import make_sites


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    sites = make_sites(folder / "sites", sites=3, rows=60, outlier=True, numbers=True)
    fitting.fit({"path": str(sites), "target": "outcome"}, folder / "out")
    return folder / "out"


def test_sections_show_what_effects_say(fitted: Path) -> None:
    effects = read_json(fitted / EFFECTS)
    by_id = {section.id: section for section in fit_page(fitted).sections}
    charts = {chart.id: chart for chart in by_id["matters"].charts}
    wanted = [(each["column"], each["mean"]) for each in effects["importance"]["columns"]]
    assert [(row[0], row[1]) for row in charts["importance"].rows] == wanted
    (output,) = effects["coefficients"]["outputs"]
    terms = {term["name"]: term for term in output["terms"]}
    drawn = {row[0]: row for row in charts["coefficients"].rows if row[1] == "all sites"}
    assert drawn[f"a (per {terms['a']['sd']:.3g})"][2:] == (terms["a"]["value"], terms["a"]["low"], terms["a"]["high"])
    top = effects["curves"][0]
    shown = [row for row in charts[f"effect-{top['column']}"].rows if row[0] == "all sites"]
    assert [row[2] for row in shown] == [y[0] for y in top["y"]]
    lines = {row[0].text: row[2].text for row in by_id["shared"].tables[0].rows}
    assert set(lines) == {"intercept", "a", "b", next(name for name in terms if name.startswith("ward="))}
    assert "(sd " in lines["a"]  # the effect is reversed at the last site


def test_without_effects_the_page_says_how_to_get_them(fitted: Path, tmp_path: Path) -> None:
    effects = read_json(fitted / EFFECTS)
    (fitted / EFFECTS).unlink()
    by_id = {section.id: section for section in fit_page(fitted).sections}
    assert "fedtailor explain" in by_id["matters"].missing
    write_json(fitted / EFFECTS, effects)


def made(gains: list[float], served: str = "mixed", noise: bool = False) -> dict[str, Any]:
    sites = {
        f"s{i}": {
            "train": 10 * (i + 1),
            "alone": 1.0,
            "personal": 1.0 - gain,
            "served": served,
            "gain_ci": [gain - 0.01, gain + 0.01],
        }
        for i, gain in enumerate(gains)
    }
    mean = sum(gains) / len(gains)
    ci = [-0.5, 0.5] if noise else [mean - 0.01, mean + 0.01]
    return {
        "metric": "rmse",
        "higher_is_better": False,
        "sites": sites,
        "means": {"alone": 1.0, "personal": 1 - mean, "common": 1.0, "baseline": 2.0},
        "differences": {"alone": {"gain": mean, "ci": ci}},
    }


def test_the_first_sentence() -> None:
    pays, noise = headline(made([0.1, 0.3])), headline(made([0.1, 0.3], noise=True))
    assert pays.startswith("Sharing pays")
    assert re.findall(r"\d[\d.]*\d|\d", pays) == ["1", "0.8", "0.2", "20.0", "95", "0.19", "0.21"]
    assert re.findall(r"\d[\d.]*\d|\d", noise) == ["1", "0.8", "95", "0.5", "0.5"]
    assert headline(made([-0.1, -0.3])).startswith("Sharing did harm")
    one, both, all_four = (headline(made([0.0] * sites, "alone")) for sites in (1, 2, 4))
    assert not {pays, noise} & {one, both, all_four}
    assert "Both sites" in both
    assert "All 4 sites" in all_four
    assert not re.search(r"\d", one)


def test_who_gains() -> None:
    found = who(made([0.2, -0.1, 0.0, 0.3, 0.4, 0.5]))
    assert found.endswith("4 gain (most: s5, s4 and s3), 1 loses (s1), 1 is too close to call.")
    assert "loses, 2" in who(made([0.0, 0.0]))
    assert who(made([0.1])) == ""


def test_small_sites_that_gain_more_are_named() -> None:
    found = by_size(made([0.4, 0.4, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1]))
    assert found.startswith("Small sites gain most")
    assert re.search(r"\b45\b.*\+0\.4.*\+0\.1", found)
    assert by_size(made([0.1, 0.2])) == ""
    assert by_size(made([0.1] * 8)).startswith("Sites change on average")


def test_who_is_served_by_what() -> None:
    assert served_sentence(["alone"]) == ""
    assert served_sentence(["mixed", "mixed"]).startswith("Both sites are served by a mixed model")
    blend = "50 % alone + 34 % common + 16 % mixed"
    assert served_sentence([blend] * 4) == "All 4 sites are served by a blend, mostly of their own model."
    assert served_sentence([blend, "mixed"]).startswith("Of 2 sites, 1 is served mostly by ")


def test_fairness_beside_alone() -> None:
    record = made([0.1, 0.3, 0.0]) | {
        "fairness": {"worst": "s2", "worst_value": 1.0, "worst_tenth": 1.0, "spread": 0.125}
    }
    figures = {figure.name: (figure.value, figure.note) for figure in fairness(record)}
    assert figures == {
        "Worst site": ("1", "s2, with its personal model"),
        "Spread over sites (sd)": ("0.125", "alone 0"),
    }
    assert fairness(made([0.1]) | {"fairness": record["fairness"]}) == ()


def test_sites_that_do_not_differ_have_no_chart_of_it() -> None:
    term = {"name": "age", "value": 1.0, "differs": False, "share": 1.0, "sd": 1.0, "reference": ""}
    assert caterpillar({"outputs": [{"terms": [term]}], "sites": ["a", "b"]}) is None
