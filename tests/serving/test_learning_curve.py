"""What a newcomer's model is expected to be with more rows, against a simulation; the curve of its own rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fedtailor as ft
from fedtailor.errors import RunError
from fedtailor.serving.learning_curve import _excess, _expected
from tests.tables.test_table_fit import table


def told(task: str, sd: float = 1.0) -> Any:
    target = SimpleNamespace(is_log=False, sd=sd, task=task)
    outputs = 2 if task == "classification" else 1
    return SimpleNamespace(task=task, outputs=outputs, preparation=SimpleNamespace(target=target))


@pytest.mark.parametrize("n", [5, 40])
def test_what_few_rows_cost_is_what_a_simulation_shows(n: int) -> None:
    rng, noise, sd = np.random.default_rng(0), 0.4, 3.0
    factor = np.diag([0.8, 0.3, 1.5])  # v = beta + L z, z ~ N(0, noise)
    design = np.concatenate([rng.normal(size=(4000, 2)), np.ones((4000, 1))], axis=1)
    server = {"factor": torch.from_numpy(factor), "noise": torch.tensor(noise), "beta": torch.zeros(3, 1)}
    excess = _excess(None, server, torch.from_numpy(design[:, :2]), told("regression", sd))  # type: ignore[arg-type]
    lost = []
    for _ in range(3000):
        v = factor @ rng.normal(scale=noise**0.5, size=3)
        x = design[rng.integers(4000, size=n)]
        y = x @ v + rng.normal(scale=noise**0.5, size=n)
        prior = np.linalg.inv(factor @ factor.T)
        guess = np.linalg.solve(x.T @ x + prior, x.T @ y)
        lost.append(sd**2 * np.mean((design[:200] @ (guess - v)) ** 2))
    assert excess(n) == pytest.approx(np.mean(lost), rel=0.1 if n == 40 else 0.25)  # of few rows, X'X varies
    assert excess(0) == pytest.approx(sd**2 * noise * np.trace(design.T @ design / 4000 @ factor @ factor.T))


def test_from_where_on_twice_as_many_rows_gain_little() -> None:
    point = {"rows": 50, "personal": {"mean": 2.0, "error": 0.1}}
    curve = _expected(point, lambda n: 1.0 / n, 40, "classification")  # a loss of 2 - 1/50 + 1/n
    # 1 / (2 n) < 0.01 (1.98 + 1 / n), from n = 0.49 / 0.0198
    assert curve["enough"] in (25, 26)
    assert curve["expected"][1] == {"rows": 80, "personal": pytest.approx(1.98 + 1 / 80)}
    assert curve["at_its_rows"]["mean"] == pytest.approx(1.98 + 1 / 40)


def test_a_newcomer_as_a_frame_of_polars_or_pandas(tmp_path: Path) -> None:
    whole = table(7, [25] * 8, slope=0.6)
    run = ft.fit(whole.filter(pl.col("site") != "s7"), "y", client_column="site", out=tmp_path / "out", progress=False)
    late = whole.filter(pl.col("site") == "s7").drop("site")
    model = run.onboard("late", late)
    curve = run.learning_curve("late")
    assert [point["rows"] for point in curve["points"]] == [5, 10, 20]
    five = curve["points"][0]
    assert five["personal"]["mean"] < five["alone"]["mean"]
    assert 3 < curve["at_its_rows"]["mean"] < 9  # the noise is 5, in units of y
    values = [point["personal"] for point in curve["expected"]]
    assert values == sorted(values, reverse=True)
    assert f"at rmse {curve['at_its_rows']['mean']:.3g} ±" in curve["sentence"]
    pandas = pytest.importorskip("pandas")
    again = run.onboard("again", pandas.DataFrame(late.to_dict(as_series=False)))
    rows = {"x1": [0.1, 2.0], "x2": [1.0, -1.0]}
    assert np.isfinite(again.predict(rows)).all()
    assert np.isfinite(model.predict(rows)).all()
    with pytest.raises(RunError, match='no newcomer "nobody"'):
        run.learning_curve("nobody")
