"""Ranks by three habits; a run from its curve to a row, resumed and not run twice."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import leaderboard
from benchmarks.evidence import ranked
from benchmarks.leaderboard import Row, finished, ranks, row, summary, table, turned
from fedtailor.algorithms import algorithms
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse


def made(title: str, best: float, last: float, selected: float) -> Row:
    return Row(title, (best, last, selected), (2, 3, 1), 1.0)


ROWS = [made("A", 90, 80, 85), made("B", 88, 88, 88), made("C", 88, 70, 60)]


def test_ranks_and_what_changes_them() -> None:
    assert ranks(ROWS, 0) == {"A": 1, "B": 2, "C": 2}
    assert ranks(ROWS, 2) == {"A": 2, "B": 1, "C": 3}
    assert turned(ROWS, 0, 2) == (1, 3)
    assert [line.split("|")[1].strip() for line in table(ROWS)[2:]] == ["B", "A", "C"]
    assert table(ROWS)[2] == "| B | 88.00 | 88.00 | 88.00 | 2 | 1 | 1 | 2 | 1 |"
    words = "\n".join(summary(ROWS, 600))
    assert re.search(r"11\.00.*\b3\b.*9\.33", words)
    assert "most for C, 28.00" in words
    assert re.search(r"\b1\b.*\b3\b.*\b33\b", words)
    assert "By the selected round: B, A, C" in words
    assert "standard error is about 1.5 points" in words


def test_a_run_becomes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"source": "digits", "clients": 4, "max_samples": 40}
    values: dict[str, Any] = {"rounds": 3, "data": data, "model": {"hidden": [8]}, "evaluation": {"test_curve": True}}
    config, folder = parse(values | {"algorithm": {"name": "fedavg"}}), tmp_path / "run"
    runner.start(config, folder, until=1)
    done = finished(config, folder)
    assert not [p for p in folder.iterdir() if p.is_dir()]
    monkeypatch.setattr(runner, "start", None)
    monkeypatch.setattr(runner, "resume", None)
    counts = [10, 10, 10, 10]
    found = row("FedAvg", finished(config, folder), counts)
    curve = [100 * sum(line["test"]["accuracy"]) / 4 for line in done.metrics()]
    assert len(curve) == 3
    assert found.figures[:2] == pytest.approx((max(curve), curve[-1]))
    assert found.figures[2] == pytest.approx(curve[found.rounds[2] - 1])
    assert row("FedAvg", done, [1, 0, 0, 0]).figures[1] == 100 * done.metrics()[-1]["test"]["accuracy"][0]


def test_rows_for_the_page_of_an_algorithm() -> None:
    board = {"Dirichlet": [asdict(one) for one in [*ROWS, made("Local", 50, 50, 50)]], "two": [asdict(ROWS[0])]}
    found = ranked("A", board).splitlines()[-2:]
    assert found == ["| Dirichlet | 85.00 | 50.00 |  | 2 of 4 |", "| two | 85.00 |  |  | 1 of 1 |"]
    assert ranked("B", board).splitlines()[-1].startswith("| Dirichlet | 88.00 |")
    assert ranked("D", board) == ""


def test_every_classifier_is_on_the_board() -> None:
    mixed = {"mixedlogit", "mixedmodel", "mixedpoisson"}
    linear = {"empiricalbayes", "jointls", "learn2pfed", "linearalone", "mocha"} | mixed
    left_out = linear | {"fedbn", "fedalt", "feddpa", "fedsa-lora"}
    names = {name for name, kind in algorithms().items() if kind.__module__.startswith("fedtailor.")}
    assert set(leaderboard.methods()) >= names - left_out
    assert not set(leaderboard.methods()) & left_out
