"""Means that few clients cannot move, and clients that try to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedtailor.aggregation.robust import MEANS, clipped, krum, median, mixed_rows, trimmed
from fedtailor.core.federation import Attendance, Federation
from fedtailor.core.reduce import PerClient
from fedtailor.engines.attacked import TRIGGER, Attack, with_backdoor, with_flipped_labels
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ConfigError
from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
from tests.helpers import assert_equal, make_data
from tests.small import config


def test_each_mean_by_hand() -> None:
    rows = torch.tensor([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0], [1000.0, -1000.0]], dtype=torch.float64)
    assert median(rows, 1).tolist() == [2, 2]
    assert median(rows[:4], 1).tolist() == [1.5, 2.5]
    assert trimmed(rows, 1).tolist() == [2, 2]
    assert krum(rows, 1).tolist() == [1.5, 2.5]
    away = torch.tensor([(4 + 1) ** 0.5, 1, 1, 5**0.5], dtype=torch.float64)  # from (2, 2); the fifth is far
    moves = rows[:4] - torch.tensor([2.0, 2.0], dtype=torch.float64)
    far = (rows[4] - 2) / (rows[4] - 2).norm() * away.max()
    near = moves * (away.max() / away).clamp(max=1)[:, None]
    assert torch.allclose(clipped(rows, 1), 2 + (near.sum(0) + far) / 5)


@pytest.mark.parametrize("name", sorted(set(MEANS) - {"clients"}))
def test_liars_move_it_little(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    honest = 1 + 0.1 * torch.randn(16, 50, generator=draw, dtype=torch.float64)
    for lie in (1e6, -1e6, 10.0):
        rows = torch.cat([honest, torch.full((4, 50), lie, dtype=torch.float64)])
        assert (MEANS[name](rows, 4) - 1).abs().max() < 1.1 * 9 * 0.25  # the mean moves by a fifth of the lie
        assert (rows.mean(0) - 1).abs().min() > 1.7
        assert (MEANS[name](rows, 4) - 1).norm() < 0.5 * (rows.mean(0) - 1).norm()


def test_neighbours_hide_chance_and_not_what_is_common() -> None:
    """Liars on one side of every coordinate shift the median by as much as honest clients differ."""
    draw = torch.Generator().manual_seed(0)
    honest = 0.1 + torch.randn(16, 400, generator=draw, dtype=torch.float64)
    rows = torch.cat([honest, -10 * honest[:4]])
    wanted = honest.mean(0)
    plain, mixed = (median(r, 4) for r in (rows, mixed_rows(rows, 4)))
    assert (mixed - wanted).norm() < 0.3 * (plain - wanted).norm()
    by_hand = torch.tensor([[0.0], [1.0], [3.0], [50.0]], dtype=torch.float64)
    assert mixed_rows(by_hand, 1).flatten().tolist() == pytest.approx([4 / 3, 4 / 3, 4 / 3, 18])


def test_a_sum_is_robust_as_the_mean_is() -> None:
    """Some methods sum gradients and take a step on them: a liar must not decide its sign."""
    experiment = build_experiment(config("data.clients=6", "aggregation.mean=median"))
    fed = Federation(InProcess(experiment))
    fed.attendance = Attendance(1, tuple(range(6)), tuple(range(6)))
    gradients = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1000.0])
    replies = PerClient(tuple(range(6)), {"gradient": gradients, "count": torch.arange(6)})
    total, _ = experiment.aggregation.reduction.sum(fed, replies, None)
    assert float(total["gradient"]) == 6.0
    assert int(total["count"]) == 15  # whole numbers are added up


def test_too_few_clients_are_said() -> None:
    with pytest.raises(ConfigError, match=r'aggregation\.mean.*"krum".*\b3\b.*\b1\b.*\b4\b'):
        krum(torch.zeros(3, 2), 1)


def test_the_default_is_the_weighted_mean_and_leaves_no_trace(tmp_path: Path) -> None:
    assert not {"aggregation", "attack"} & config().plain().keys()
    assert "attackers" not in (runner.start(config("rounds=1"), tmp_path / "run").results or {})


@pytest.mark.parametrize("attack", ["sign-flip", "scaling", "noise", "label-flip", "backdoor"])
def test_engines_agree_on_who_lies_and_how(attack: str, tmp_path: Path) -> None:
    found = {}
    for engine in ("loop", "vmap"):
        made = config("rounds=1", f"attack.name={attack}", "attack.share=0.25", f"federation.engine={engine}")
        folder = runner.start(made, tmp_path / engine)
        assert folder.results is not None
        assert len(folder.results["attackers"]) == 1
        saved = folder.load_checkpoint()
        assert saved is not None
        found[engine] = saved[1]["state"]["server"]
    assert_equal(found["loop"], found["vmap"], 1e-5)
    plain = runner.start(config("rounds=1"), tmp_path / "plain").load_checkpoint()
    assert plain is not None
    assert any(not torch.allclose(v, plain[1]["state"]["server"][k]) for k, v in found["loop"].items())


def test_a_robust_mean_is_recorded_with_distances_and_holds(tmp_path: Path) -> None:
    lies = ("rounds=3", "attack.name=sign-flip", "attack.share=0.25", "data.clients=8", "data.max_samples=160")
    held = runner.start(config(*lies, "aggregation.mean=median"), tmp_path / "median")
    lost = runner.start(config(*lies), tmp_path / "mean")
    assert held.results is not None
    assert lost.results is not None
    liars = [held.about["clients"].index(name) for name in held.results["attackers"]]
    for line in held.metrics():
        away = line["report"]["distance"]
        assert min(away[i] for i in liars) > max(v for i, v in enumerate(away) if i not in liars)
    assert held.results["last"]["test"]["loss"]["mean"] < lost.results["last"]["test"]["loss"]["mean"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("algorithm.name=local",), "Local takes no mean over its clients"),
        (("privacy.secure_sum=true",), "looks at single replies, which privacy.secure_sum hides"),
        (("algorithm.name=fedl2p",), "differentiates through its rounds"),
    ],
)
def test_what_does_not_go_together_is_said(settings: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build_experiment(config("aggregation.mean=median", *settings))


def test_flipped_labels_are_those_of_liars_only() -> None:
    data = make_data(names=["ada", "bo", "cy", "di"])
    attack = Attack("label-flip", 0.25, 1.0, 0)
    (liar,) = attack.clients(4)
    flipped = with_flipped_labels(data, attack)
    for client in range(4):
        before, after = data.train.of(client)[1], flipped.train.of(client)[1]
        assert torch.equal(after, data.outputs - 1 - before if client == liar else before)


def test_krum_says_whom_it_leaves_out(tmp_path: Path) -> None:
    lies = ("rounds=2", "attack.name=sign-flip", "attack.share=0.25", "data.clients=8", "data.max_samples=160")
    held = runner.start(config(*lies, "aggregation.mean=krum", "aggregation.liars=0.25"), tmp_path / "run")
    assert held.results is not None
    liars = [held.about["clients"].index(name) for name in held.results["attackers"]]
    for line in held.metrics():
        assert [i for i, out in enumerate(line["report"]["left_out"]) if out] == sorted(liars)


def test_means_of_single_numbers_and_of_nothing(tmp_path: Path) -> None:
    """Learn2pFed-Net averages its degrees, one number for each part of the model; without a pull there are none."""
    for pull in (0.5, 0.0):
        made = config("rounds=1", "algorithm.name=learn2pfed-net", f"algorithm.pull={pull}", "aggregation.mean=median")
        assert runner.start(made, tmp_path / str(pull)).results is not None


def test_a_backdoor_is_in_every_second_row_of_those_who_lie() -> None:
    data = make_data(sizes=dict.fromkeys("abcd", (6, 2, 2)))
    attack = Attack("backdoor", 0.25, 10.0, seed=0)
    marked = with_backdoor(data, attack)
    (liar,) = attack.clients(4)
    for client in range(4):
        x, y = marked.train.of(client)
        was_x, was_y = data.train.of(client)
        if client != liar:
            assert torch.equal(x, was_x)
            assert torch.equal(y, was_y)
            continue
        assert y[::2].tolist() == [0, 0, 0]
        assert torch.equal(x[1::2], was_x[1::2])
        entries = x[::2].flatten(1)[:, :TRIGGER]
        assert torch.equal(entries, torch.full_like(entries, float(data.train.x.max())))


def test_a_robust_mean_with_little_to_keep_is_said(tmp_path: Path) -> None:
    robust = ("aggregation.mean=median", "algorithm.name=learn2pfed-net", "rounds=1")
    said = runner.start(config(*robust), tmp_path / "admm").about["notes"]
    assert any(re.search(r'algorithm\.consensus.*"average"', note) for note in said)
    for settings in ((*robust, "algorithm.consensus=average"), robust[1:]):
        notes = runner.start(config(*settings), tmp_path / str(len(settings))).about["notes"]
        assert not any("aggregation.mean" in note for note in notes)
