"""Optimizers and schedules: equal to torch's own, on every engine, with exact derivatives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.errors import ConfigError
from fedtailor.experiments.config import parse
from fedtailor.testing import contract
from fedtailor.training.solver import Solver
from fedtailor.training.specification import Schedule
from tests.helpers import F64, assert_equal, make_data, make_me, make_model, variants

WHOLE = Solver(lr=0.05, batch_size=0)
TORCH: dict[str, tuple[Solver, Any]] = {
    "sgd": (WHOLE, lambda p: torch.optim.SGD(p, 0.05)),
    "momentum": (replace(WHOLE, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, 0.9)),
    "nesterov": (
        replace(WHOLE, optimizer="nesterov", momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True),
    ),
    "adam": (replace(WHOLE, optimizer="adam"), lambda p: torch.optim.Adam(p, 0.05, eps=0)),
    "adamw": (
        replace(WHOLE, optimizer="adamw", weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1, eps=0),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_steps_are_those_of_torch(name: str) -> None:
    solver, make = TORCH[name]
    data = make_data("regression")
    model = make_model("mlp", data)
    params = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    optimizer, (x, y) = make(list(params.values())), data.train.of(0)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(torch.func.functional_call(model.module, params, (x,)), y).backward()
        optimizer.step()
    wanted = {k: v.detach() for k, v in params.items()}
    assert_equal(make_me(data, model, 0, solver).sgd(model.params, epochs=4), wanted, 1e-7)


SCHEDULES = {
    "cosine": Schedule("cosine", "steps", warmup=2, last=0.1),
    "linear": Schedule("linear", "steps"),
    "step": Schedule("step", "steps", decay=0.5, every=2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_step_sizes_follow_the_schedule(name: str) -> None:
    schedule = SCHEDULES[name]
    data = make_data("regression")
    model = make_model("linear", data)
    wanted = dict(model.params)
    for step in range(6):
        lr = 0.05 * schedule.factor(step, 6)
        wanted = make_me(data, model, 0, replace(WHOLE, lr=lr)).sgd(wanted)
    assert_equal(make_me(data, model, 0, replace(WHOLE, schedule=schedule)).sgd(model.params, epochs=6), wanted)


def test_factors() -> None:
    cosine = Schedule("cosine", length=11, warmup=0, last=0.2)
    assert [cosine.in_round(r) for r in (0, 1, 6, 11, 20)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])
    assert cosine.in_round(3) == pytest.approx(0.2 + 0.4 * (1 + math.cos(0.2 * math.pi)))
    warm = Schedule("linear", length=6, warmup=2)
    assert [warm.in_round(r) for r in range(1, 7)] == pytest.approx([0.5, 1, 1, 2 / 3, 1 / 3, 0])
    step = Schedule("step", decay=0.1, every=3)
    assert [step.in_round(r) for r in (1, 3, 4, 7)] == pytest.approx([1, 1, 0.1, 0.01])
    assert Schedule().is_constant
    assert not Schedule(warmup=1).is_constant


def test_rounds_have_the_step_size_of_the_schedule() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    solver = replace(WHOLE, schedule=Schedule("linear", length=5))
    me = make_me(data, model, 0, solver)
    me.round = 3
    assert me.lr == pytest.approx(0.025)
    assert solver.is_plain  # the fast paths take it
    half = make_me(data, model, 0, replace(WHOLE, lr=0.025))
    assert_equal(me.sgd(model.params), half.sgd(model.params))


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_an_epoch_of_so_many_steps(steps: int) -> None:
    data = make_data()  # of 9, 1, 6 and 13 samples
    model = make_model("mlp", data)
    for client in range(4):
        me = make_me(data, model, client, Solver(batch_size=4, epoch=steps))
        batches = me.solver._batches(me, data.train, 2, 0, False)  # type: ignore[attr-defined]
        assert len(batches) == 2 * steps == int(me.steps(2))
        rows = torch.cat([b.rows for b in batches])
        seen = (rows[:, None] == torch.arange(*data.train.starts[client : client + 2].tolist())).sum(0)
        assert int(seen.max() - seen.min()) <= 1  # every sample comes before any comes again


CASES = {
    "adamw-cosine-warmup": Solver(
        "adamw", 0.01, weight_decay=0.1, batch_size=4, schedule=Schedule("cosine", "steps", warmup=1)
    ),
    "nesterov-rounds": Solver("nesterov", 0.05, 0.9, batch_size=4, schedule=Schedule("linear", length=4, last=0.5)),
    "steps": Solver(lr=0.1, batch_size=4, epoch=3),
}


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto", "fedrep", "learn2pfed-net", "duw-fedavg"])
@pytest.mark.parametrize("case", CASES)
def test_engines_agree(algorithm: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.CASES, case, {"solver": CASES[case]})
    for engine in ("vmap2", "wire"):
        contract.engines_agree(variants()[algorithm], case, engine)
    contract.reference.cache_clear()


@pytest.mark.parametrize("case", CASES)
def test_derivatives_are_exact(case: str) -> None:
    data = make_data("regression")
    model = make_model("linear", data)

    def outcome(lr: Tensor) -> Tensor:
        me = make_me(data, model, 3, CASES[case])
        return me.loss(me.sgd(model.params, epochs=2, lr=lr), "val")

    lr = torch.tensor(0.02, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(outcome, (lr,), eps=1e-6, atol=1e-6)


def halved(s: Solver, param: Tensor, gradient: Tensor, memory: list[Tensor], number: int) -> Tensor:
    """An optimizer of one's own."""
    return gradient / 2


def test_an_own_optimizer() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    own = make_me(data, model, 0, replace(WHOLE, optimizer="tests.training.test_optimizers:halved"))
    assert_equal(own.sgd(model.params), make_me(data, model, 0, replace(WHOLE, lr=0.025)).sgd(model.params))


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"optimizer": "adamm"}, 'no optimizer "adamm"; did you mean "adam"'),
        ({"schedule": "step"}, "needs lr_decay_every"),
        ({"optimizer": "nesterov"}, "needs momentum"),
        ({"schedule": "cosin"}, "local.schedule"),
    ],
)
def test_what_cannot_be_is_refused(local: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse({"local": local})
