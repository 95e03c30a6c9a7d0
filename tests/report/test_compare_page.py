"""The page on a folder of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.store import RunFolder, write_json
from fedtailor.report.write import write
from tests.report.pages import report
from tests.small import config, stop_after


def means(runs: Path) -> dict[str, float]:
    """The mean over clients of every run, by its title."""
    titles = {"local": "Local", "fedavg": "FedAvg", "fedrep": "FedRep"}
    found = {title: RunFolder(runs / f"{name}-seed0").results or {} for name, title in titles.items()}
    return {title: r["last"]["test"]["accuracy"]["mean"] for title, r in found.items()}


def test_figures_are_those_of_the_runs(runs: Path) -> None:
    page = report(runs)
    assert (runs / "report.html").stat().st_size < 5e6
    assert "finished: 3 of 3 runs" in page.text
    assert {r["algorithm"]: r["accuracy"] for r in page.rows("traffic")} == pytest.approx(means(runs), rel=1e-6)
    best = max(means(runs).items(), key=lambda item: item[1])
    assert f"{best[0]} has the best mean test accuracy, {100 * best[1]:.2f} %" in page.text
    assert {r["algorithm"] for r in page.rows("learning")} == {"Local", "FedAvg", "FedRep"}
    assert len(page.rows("gains")) == 2 * 4
    assert {r["algorithm"]: r["hurt"] for r in page.rows("hurt")}["Local"] == 0
    assert set(page.charts) == {"traffic", "learning", "worst", "hurt", "gains"}


def test_the_table_can_be_sorted(runs: Path) -> None:
    page = report(runs)
    (table,) = (a for a in page.of("table") if "data-sortable" in a)
    assert str(table["aria-label"]).startswith("All algorithms")
    keys = [a["data-key"] for a in page.of("td") if "data-key" in a]
    assert float(str(keys[0])) == pytest.approx(means(runs)["FedAvg"], rel=1e-6)


def test_labels_and_seeds_come_from_the_table(runs: Path) -> None:
    write_json(runs / "compare.json", {})
    (runs / "fedavg-seed0").rename(runs / "fedavg__long_-seed0")
    (runs / "table.md").write_text("| algorithm | test |\n|---|---:|\n| FedAvg (long) | 1 |\n")
    assert {r["algorithm"] for r in report(runs).rows("traffic")} == {"Local", "FedAvg (long)", "FedRep"}


def test_columns_of_a_published_table_are_tasks(runs: Path) -> None:
    for name in ("local", "fedavg"):
        (runs / f"{name}-seed0").rename(runs / f"{name}_i__sizes-seed0")
        runner.start(config("rounds=2", "data.clients=3", f"algorithm.name={name}"), runs / f"{name}_ii__labels-seed0")
    (runs / "fedrep-seed0").rename(runs / "own_way_i__sizes-seed0")
    (runs / "table.md").write_text("| | I: sizes | II: labels |\n|---|---:|---:|\n| own way | 1 (2) | - |\n")
    page = report(runs)
    assert {r["algorithm"] for r in page.rows("traffic")} == {"Local", "FedAvg", "own way"}
    assert {r["algorithm"] for r in page.rows("traffic-1")} == {"Local", "FedAvg"}
    assert "With I: sizes" in page.text
    assert "| own way | 1 (2) | - |" in page.text


def test_missing_pieces(runs: Path) -> None:
    (runs / "local-seed0/results.json").unlink()
    (runs / "fedrep-seed0/config.toml").write_text("changed")
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("rounds=3", "algorithm.name=ditto"), runs / "ditto-seed0", listener=stop_after(1))
    page = report(runs)
    assert "not finished: 1 of 3 runs" in page.text
    assert "1 run cannot be read" in page.text
    assert "no finished run of Local" in page.text
    assert set(page.charts) == {"traffic", "learning", "worst"}


def test_nothing_finished_and_nothing_readable(runs: Path) -> None:
    for results in runs.glob("*/results.json"):
        results.unlink()
    assert set(report(runs).charts) == {"learning"}
    for about in runs.glob("*/run.json"):
        about.write_text("{}")
    with pytest.raises(RunError, match=r"run\.json"):
        write(runs)
