"""Convolutions on a device: stacked where a round is faster so, which is measured."""

import pytest

from fedtailor.algorithms import make
from fedtailor.engines import choice, choose
from tests.devices.federations import CASES, experiment


def test_a_round_is_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = experiment(make("fedavg", {}), CASES["conv"], "sim:0")
    alone, stacked = choice.round_seconds(setting, 4)
    assert min(alone, stacked) > 0
    for figures, wanted in (((0.5, 0.25), "vmap"), ((0.25, 0.5), "loop")):
        monkeypatch.setattr(choice, "round_seconds", lambda setting, clients, figures=figures: figures)
        assert choose(setting).name == wanted
        assert "s stacked and" in choose(setting).why


def test_dense_networks_are_stacked_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measure_round", None)
    assert choose(experiment(make("fedavg", {}), CASES["classification"], "sim:0")).name == "vmap"
