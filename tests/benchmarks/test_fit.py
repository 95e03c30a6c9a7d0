"""The share of sites that are worse off, in benchmarks/fit.py."""

from __future__ import annotations

from benchmarks.fit import OURS, worse
from benchmarks.fit_baselines import ALONE


def run(rows: list[int], ours: list[float], own: list[float]) -> dict[str, object]:
    losses = {OURS: ours, ALONE[0]: own, ALONE[1]: [9.0] * len(own)}
    return {"site": ["a"] * len(rows), "row": rows, "losses": losses}


def test_a_row_counts_once_however_many_seeds_test_it() -> None:
    two = run([1, 2], [1.0, 2.1], [0.5, 1.5])
    assert worse([two]) == 0.0
    assert worse([two] * 10) == 0.0  # twenty losses, but of two rows
    assert (
        worse([run(list(range(10)), [1.0 + i % 3 for i in range(10)], [0.5 + 0.9 * (i % 3) for i in range(10)])]) == 1.0
    )
    assert worse([run(list(range(10)), [0.5] * 10, [1.0 + i for i in range(10)])]) == 0.0
