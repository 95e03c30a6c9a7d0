"""Layers that move by the factors of their gradient move as by the gradient."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.training.kernels import descent as factors
from tests.helpers import F64, SOLVER, assert_equal, make_data, make_me

MASK = "mask"


class Repeated(nn.Module):
    """Layers used twice, or on several rows of a sample, or with their weights in another place, or never."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(inputs, 6)
        self.twice = nn.Linear(6, 6)
        self.rows = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(6, 6)
        self.idle = nn.Linear(2, 2)
        self.out = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = torch.tanh(self.rows(x.unflatten(1, (2, 3))).flatten(1))
        return self.out(torch.tanh(F.linear(self.tied(x), self.tied.weight)))


@pytest.mark.parametrize("part", ["all", "some", "prox", MASK])
def test_steps_are_those_by_gradients(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    data = make_data()
    model = Model(Repeated(data.shape[0], data.outputs).to(F64))
    trained = {k: v for k, v in model.params.items() if part != "some" or k.startswith(("twice", "out"))}

    def run(least: int) -> tuple[Params, int]:
        used = Mock(wraps=factors._Linear.apply)
        monkeypatch.setattr(factors._Linear, "apply", used)
        monkeypatch.setattr(factors, "LEAST", least)
        return make_me(data, model, 0, SOLVER).sgd(
            trained,
            epochs=3,
            frozen={k: v for k, v in model.params.items() if k not in trained},
            prox=({k: v + 0.1 for k, v in trained.items()}, 0.3) if part in ("prox", MASK) else None,
            mask={k: v > 0 for k, v in trained.items()} if part == MASK else None,
        ), used.call_count

    wanted, never = run(10**9)
    found, often = run(1)
    assert_equal(found, wanted, 1e-12)
    assert never == 0
    assert bool(often) == (part != MASK)
    assert all("forward" not in vars(layer) for layer in model.module.modules())


class Descends(nn.Module):
    """Its forward pass takes gradients of its own, to be differentiated again or not."""

    def __init__(self, inputs: int, outputs: int, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.out, self.again = nn.Linear(inputs, 6), nn.Linear(6, outputs), again

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            height = torch.tanh(self.layer(moved)).square().sum()
            (slope,) = torch.autograd.grad(height, moved, create_graph=self.again)
        made: Tensor = self.out(torch.tanh(self.layer(x + slope)))
        return made


@pytest.mark.parametrize("again", [False, True])
def test_gradients_inside_the_forward_pass(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    data = make_data()
    model = Model(Descends(data.shape[0], data.outputs, again).to(F64))
    trained = []
    for least in (1, 10**9):
        monkeypatch.setattr(factors, "LEAST", least)
        trained.append(make_me(data, model, 0, SOLVER).sgd(model.params))
    assert_equal(trained[0], trained[1], 1e-12)


def test_a_layer_without_anything_else_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "LEAST", 1)
    data = make_data()
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(data.shape[0], data.outputs, bias=False)).to(F64))
    found = make_me(data, model, 0, SOLVER).sgd(model.params)
    monkeypatch.setattr(factors, "LEAST", 10**9)
    assert_equal(found, make_me(data, model, 0, SOLVER).sgd(model.params), 1e-12)


def test_what_others_have_changed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "LEAST", 1)
    layer = nn.Linear(2, 2)
    own = Mock(return_value=torch.zeros(1))
    layer.forward = own  # type: ignore[method-assign]
    with factors.factored_updates(nn.Sequential(layer), {"0.weight"}) as kept:
        layer(torch.zeros(1, 2))
    assert own.call_count == 1
    assert layer.forward is own
    assert kept == []
