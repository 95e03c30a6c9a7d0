"""Noise on a grid: its distribution, its source, and that nothing draws it twice."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare  # type: ignore[import-untyped]

from fedtailor.aggregation import noise as sampler
from fedtailor.aggregation.noise import STEPS, LocalNoise, add_noise, discrete_gaussian
from fedtailor.core.random import stream
from fedtailor.experiments import runner
from fedtailor.experiments.store import read_json
from fedtailor.studies.result_tables import private_words
from tests.aggregation.test_noise import NOISE
from tests.helpers import F64
from tests.small import config, stop_after


def test_it_is_the_discrete_gaussian_of_a_small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four steps per standard deviation every value has a probability that can be counted."""
    monkeypatch.setattr(sampler, "BITS", 2)
    monkeypatch.setattr(sampler, "STEPS", 4)
    drawn = discrete_gaussian(200_000, stream("a", "test").bytes)
    values = np.arange(-12, 13)
    weights = np.exp(-(values**2) / 32)
    counts = np.array([(drawn == v).sum() for v in values])
    assert (np.abs(drawn) <= 24).all()
    expected = weights / weights.sum() * counts.sum()
    assert chisquare(counts, expected).pvalue > 1e-3
    assert abs(counts.sum() / 200_000 - 0.9982) < 0.0005  # 3.125 standard deviations: erf(3.125 / sqrt(2))


def test_it_has_the_moments_of_its_size() -> None:
    drawn = discrete_gaussian(200_000, stream("another", "test").bytes) / STEPS
    for power, wanted, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((drawn**power).mean() - wanted) < 4 * math.sqrt(spread / 200_000)


def test_it_is_drawn_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return bytes(stream("os", len(asked)).bytes(count))

    monkeypatch.setattr(sampler.discrete_gaussian, "__defaults__", (urandom,))
    add_noise({"a": torch.zeros(1000, dtype=F64)}, 1.0, 1.0)
    assert sum(asked) > 8 * 4 * 1000
    monkeypatch.undo()
    assert sampler.discrete_gaussian.__defaults__ == (os.urandom,)
    one, other = (discrete_gaussian(1000) for _ in range(2))
    assert (one == other).sum() < 3  # by chance three in 1e-15 of runs


def test_every_number_is_on_one_grid_whatever_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bits of a sum say nothing: what is 0.1 and what is a third land on multiples of one step."""
    monkeypatch.setattr(sampler.discrete_gaussian, "__defaults__", (stream("six", "test").bytes,))
    values = torch.tensor([0.0, 0.1, 1 / 3, -1e-9, 123.456, 1e5], dtype=F64)
    noisy = add_noise({"a": values}, 0.7, 0.5)["a"].numpy()
    step = 0.7 / (1 - math.sqrt(6) * 0.7 / STEPS / 1.0) / STEPS
    whole = noisy / step
    assert (np.abs(whole - np.rint(whole)) < 1e-3).all()
    assert len(set(whole)) == 6


def test_noise_covers_what_rounding_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two neighbours are 2 clip apart, and on the grid a step more for each number in the worst case."""
    numbers, std, clip = 10**6, 8.0, 0.5
    step = std / (1 - math.sqrt(numbers) * std / STEPS / (2 * clip)) / STEPS
    assert step * STEPS / std >= (2 * clip + math.sqrt(numbers) * step) / (2 * clip)
    monkeypatch.setattr(sampler.discrete_gaussian, "__defaults__", (stream("a", "grid").bytes,))
    drawn = add_noise({"a": torch.zeros(numbers, dtype=F64)}, std, clip)["a"]
    assert torch.equal(drawn, torch.from_numpy(discrete_gaussian(numbers, stream("a", "grid").bytes) * step))
    assert drawn.std().item() == pytest.approx(step * STEPS, rel=4 / math.sqrt(2 * numbers))


def test_a_change_that_is_no_number_becomes_none() -> None:
    sent = {"w": torch.ones(50, dtype=F64)}
    reply = {"w": torch.full((50,), torch.nan, dtype=F64)}
    made = LocalNoise(0.5, 2.0).apply(reply, (sent,), (False,))["w"]
    assert made.isfinite().all()
    assert (made - 1).norm() < 2 * math.sqrt(50)  # chi squared of 50 above 200: by chance in 1e-19 of runs


def epsilons(folder: Any) -> list[Any]:
    return [line["epsilon"] for line in folder.metrics()]


def test_a_run_draws_no_noise_from_its_seed(tmp_path: Path) -> None:
    one, other = (runner.start(config(*NOISE), tmp_path / name).load_checkpoint() for name in "ab")
    assert one is not None
    assert other is not None
    a, b = (torch.cat([v.flatten() for v in saved[1]["state"]["server"].values()]) for saved in (one, other))
    assert (a == b).sum() < 3  # of 610 numbers in single precision: by chance three in 1e-14 of runs


def test_a_round_that_is_repeated_after_a_crash_counts_again(tmp_path: Path) -> None:
    """Its noise is fresh, and its first sum may have been seen."""
    with pytest.raises(KeyboardInterrupt):
        runner.start(config(*NOISE), tmp_path / "run", listener=stop_after(2))
    before = read_json(tmp_path / "run" / "noise.json")["sums"]
    folder = runner.resume(tmp_path / "run")
    after = read_json(tmp_path / "run" / "noise.json")["sums"]
    assert before == {"1": 1, "2": 1}
    assert after == {"1": 1, "2": 2, "3": 1, "4": 1, "5": 1}
    assert folder.results is not None
    assert folder.results["privacy"]["noisy_sums"] == 6
    straight = runner.start(config(*NOISE), tmp_path / "straight")
    assert epsilons(folder)[-1] > epsilons(straight)[-1]


def test_repeatable_noise_protects_nobody_and_says_so(tmp_path: Path) -> None:
    settings = (*NOISE, "privacy.repeatable_noise=true")
    one, other = (runner.start(config(*settings), tmp_path / name) for name in "ab")
    assert epsilons(one) == ["not private: noise is reproducible"] * 5
    assert one.results is not None
    assert one.results["privacy"]["epsilon"] == "not private: noise is reproducible"
    assert one.metrics()[-1]["val"] == other.metrics()[-1]["val"]
    assert "epsilon not private: noise is reproducible" in private_words(one.results["privacy"])
