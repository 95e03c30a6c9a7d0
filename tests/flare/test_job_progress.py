"""What is shown of a job while somebody waits for it."""

from __future__ import annotations

import io
import math

import pytest

from fedtailor.cli.federation_progress import JobLines
from fedtailor.flare.job_progress import CONNECTING, FINISHING, TRAINING, JobProgress


def test_the_time_left_follows_from_the_rounds_of_this_job() -> None:
    """Ten rounds were done before it; two took 6 s."""
    now = JobProgress(TRAINING, round=12, rounds=20, first=10, seconds=6.0)
    assert now.left == 24.0
    assert math.isnan(JobProgress(TRAINING, round=10, rounds=20, first=10, seconds=6.0).left)
    assert "24 s left" in now.words
    assert "left" not in JobProgress(FINISHING, round=20, rounds=20, first=10, seconds=6.0).words


def test_it_crosses_the_network_as_json() -> None:
    now = JobProgress(TRAINING, 3, 9, "accuracy", 0.5, sites=2, named=3, exchanges=17, seconds=2.5)
    assert JobProgress.read(now.plain()) == now
    assert JobProgress(TRAINING).plain()["value"] is None
    later = JobProgress.read({"stage": "training", "value": None, "planets": 8})
    assert math.isnan(later.value)


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for every stage; within one, no more than one in five seconds, and none that repeats."""
    clock = iter([100.0, 101.0, 102.0, 108.0, 120.0, 121.0])
    monkeypatch.setattr("fedtailor.cli.federation_progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    lines = JobLines(stream)
    lines(JobProgress(CONNECTING, sites=1, named=3))
    for round in (1, 2, 3, 3):
        lines(JobProgress(TRAINING, round=round, rounds=9))
    lines(JobProgress(FINISHING, round=9, rounds=9))
    shown = [line.split("  ")[:2] for line in stream.getvalue().splitlines()]
    assert shown == [
        ["waiting for sites", "1 of 3 sites"],
        ["training", "round 1/9"],
        ["training", "round 3/9"],
        ["finishing", "round 9/9"],
    ]
