"""Convolutions on a device: stacked where a round is faster so, which is measured once for a model and a device."""

from pathlib import Path

import pytest
import torch

from fedtailor.algorithms import make
from fedtailor.engines import choice, choose
from tests.devices.federations import CASES, experiment


def test_a_round_is_measured_both_ways_and_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setting = experiment(make("fedavg", {}), CASES["conv"], "sim:0")
    first = choose(setting)
    (file,) = (tmp_path / "fedtailor" / "measured").iterdir()
    alone, stacked = choice.round_seconds(setting, 4)
    assert first.name == ("vmap" if stacked < alone else "loop")
    assert "s stacked and" in first.why
    for figures, wanted in (("[0.5, 0.25]", "vmap"), ("[0.25, 0.5]", "loop")):
        file.write_text(figures)  # what is kept decides: nothing is measured again
        assert choose(setting).name == wanted
    file.write_text("damaged")
    assert choose(setting).why != "damaged"
    assert file.read_text() != "damaged"


def test_another_model_or_its_steps_are_measured_anew() -> None:
    conv = experiment(make("fedavg", {}), CASES["conv"], "sim:0")
    keys = {
        choice._cache_key(conv, 4),
        choice._cache_key(conv, 3),
        choice._cache_key(experiment(make("ditto", {}), CASES["conv"], "sim:0"), 4),
        choice._cache_key(experiment(make("fedavg", {}), CASES["batchnorm-private"], "sim:0"), 4),
    }
    assert len(keys) == 4
    assert choice._cache_key(conv.on(torch.device("sim:1")), 4) in keys  # the same kind of device


def test_dense_networks_are_stacked_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measure_round", None)
    assert choose(experiment(make("fedavg", {}), CASES["classification"], "sim:0")).name == "vmap"
