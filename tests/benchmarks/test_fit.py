"""The share of sites that are worse off, in benchmarks/fit.py, and how intervals and probabilities are judged."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom  # type: ignore[import-untyped]

from benchmarks.fit_baselines import ALONE
from benchmarks.fit_intervals import calibrated, calibration_error, coverage
from benchmarks.fit_worse import OURS, drawn_test, equal_odds, t_test, worse


def run(rows: list[int], ours: list[float], own: list[float]) -> dict[str, object]:
    losses = {OURS: ours, ALONE[0]: own, ALONE[1]: [9.0] * len(own)}
    said = {name: [[v**0.5] for v in of_method] for name, of_method in losses.items()}
    return {"site": ["a"] * len(rows), "row": rows, "y": [0.0] * len(rows), "said": said}


def of_classes(y: list[int], ours: float, own: float) -> dict[str, object]:
    said = {name: [[1 - p, p]] * len(y) for name, p in ((OURS, ours), (ALONE[0], own), (ALONE[1], 0.001))}
    return {"site": ["a"] * len(y), "row": list(range(len(y))), "y": y, "said": said}


def test_a_row_counts_once_however_many_seeds_test_it() -> None:
    two = run([1, 2], [1.0, 2.1], [0.5, 1.5])
    assert worse([two], t_test) == 0.0
    assert worse([two] * 10, t_test) == 0.0  # twenty losses, but of two rows
    ten = list(range(10))
    lost = run(ten, [1.0 + i % 3 for i in ten], [0.5 + 0.9 * (i % 3) for i in ten])
    assert worse([lost], t_test) == worse([lost], drawn_test) == 1.0
    assert worse([run(ten, [0.5] * 10, [1.0 + i for i in ten])], t_test) == 0.0


def test_rows_of_one_class_do_not_show_that_certainty_is_right() -> None:
    # own 0.98 against 0.93: the own model is better if the class has more than 96 %; 8 rows of it are no evidence
    few = of_classes([1] * 8, 0.93, 0.98)
    assert worse([few], drawn_test) == 0.0
    assert worse([of_classes([1] * 200, 0.93, 0.98)], drawn_test) == 1.0
    nearly = few | {"said": few["said"] | {OURS: [[0.07 + 1e-4 * i, 0.93 - 1e-4 * i] for i in range(8)]}}  # type: ignore[operator]
    assert worse([nearly], t_test) == 1.0  # which is what is wrong with it


def test_chance_is_that_of_a_binomial() -> None:
    lost = np.tile(np.log([[0.02 / 0.07, 0.98 / 0.93]]), (60, 1))
    p = equal_odds(lost)[0, 1]
    assert p == pytest.approx(np.log(0.07 / 0.02) / (np.log(0.07 / 0.02) + np.log(0.98 / 0.93)), abs=1e-6)
    y = np.array([1] * 59 + [0])
    chance = drawn_test(lost, (np.arange(60), y))
    assert chance == pytest.approx(binom.sf(58, 60, p), abs=0.01)


def test_intervals_and_calibration() -> None:
    y = np.arange(10.0)
    assert coverage(y, y - 1, np.where(y < 8, y + 1, y - 0.5)) == {"coverage": 0.8, "width": pytest.approx(1.7)}
    p, classes = np.repeat([0.2, 0.8], 100), np.repeat([0, 1], 100)
    assert calibration_error(p, classes) == pytest.approx(0.2)
    same = calibrated(p, classes, np.ones(200), np.zeros(200))
    assert not same["changed"]
    assert same["error before"] == pytest.approx(same["error after"])
    shifted = calibrated(p, classes, np.full(200, 2.0), np.zeros(200))
    assert shifted["log loss before"] == pytest.approx(np.log1p(0.25**0.5))  # the logit was half as large
