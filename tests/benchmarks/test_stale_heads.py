"""benchmarks/stale_heads.py measures what a run with `local.refit` serves, once, and keeps it."""

import json
from pathlib import Path
from statistics import mean

import pytest
from scipy import stats  # type: ignore[import-untyped]

from benchmarks import stale_heads
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import RESULTS, read_json


@pytest.fixture(autouse=True)
def few_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_heads, "KEPT", tmp_path)
    monkeypatch.setattr(stale_heads, "DIGITS", 3)


def test_what_is_served_and_refitted_is_what_a_run_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stale_heads.COLUMNS["digits"] | {"local": {"lr": 0.5, "batch_size": 2000}}  # batches need no drawing
    monkeypatch.setitem(stale_heads.COLUMNS, "digits", whole)
    figures = stale_heads.measured("digits", "fedper", 0)
    assert set(figures) == {"served", "before", "refit 1", "refit 3", "refit 10"}
    for refit in (0, 3):
        tables = {"seed": 0, "rounds": 3, "algorithm": {"name": "fedper"}, "local": whole["local"] | {"refit": refit}}
        config = parse(whole | tables)
        folder = runner.start(config, tmp_path / f"run-{refit}")
        expected = 100 * read_json(folder.path / RESULTS)["last"]["test"]["accuracy"]["mean"]
        assert mean(figures[f"refit {refit}" if refit else "served"]) == pytest.approx(expected)


def test_a_finished_run_is_read_and_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "digits-fedper-7.json").write_text(json.dumps({"served": [50.0]}))
    assert stale_heads.measured("digits", "fedper", 7) == {"served": [50.0]}


def test_methods_without_a_private_part_are_served_only() -> None:
    assert set(stale_heads.measured("digits", "fedavg+ft", 0)) == {"served"}


def test_pairs_are_the_clients_of_all_seeds() -> None:
    served, refitted = [[50.0, 60.0, 70.0], [40.0, 55.0, 65.0]], [[52.0, 63.0, 74.0], [45.0, 54.0, 71.0]]
    runs = {"fedper": [{"served": s, "refit 3": r} for s, r in zip(served, refitted, strict=True)]}
    (line,) = stale_heads.tested(runs | {"fedavg+ft": [{"served": [1.0]}]})
    p = stats.wilcoxon([2, 3, 4, 5, -1, 6], method="exact").pvalue
    assert line == f"- fedper: better for 5, worse for 1 of 6 clients, p = {p:.2g}, corrected {p:.2g}"


def test_the_best_that_is_served_is_compared_with_each_of_the_others() -> None:
    served = {"fedper": [50.0, 60.0, 70.0], "fedeq": [61.0, 62.0, 69.0], "knn-per": [40.0, 57.0, 60.0]}
    best, lines = stale_heads.against_the_best({method: [{"served": v}] for method, v in served.items()})
    assert best == "fedeq"
    ps = [stats.wilcoxon(d, method="exact").pvalue for d in ([11, 2, -1], [21, 5, 9])]
    corrected = [max(ps[0], 2 * ps[1]), 2 * ps[1]]
    assert lines == [
        f"- {name}: better for {better}, worse for {worse} of 3 clients, p = {p:.2g}, corrected {c:.2g}"
        for name, better, worse, p, c in zip(["fedper", "knn-per"], [2, 3], [1, 0], ps, corrected, strict=True)
    ]
