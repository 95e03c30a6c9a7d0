"""Learn2pFed on the head of a network: its gradient through all cells, an outer epoch by hand, what it sends."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms import make
from fedtailor.algorithms._shared.learnables import SCALARS
from fedtailor.algorithms.learn2pfed_head import Learn2pFedHead, as_head, column, head_of
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree, items, tree_map
from fedtailor.errors import ConfigError
from tests.helpers import ENGINES, F64, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run

ALL = ("lam", *SCALARS)
OPEN: dict[str, Any] = {
    "learned": ALL,
    "reach": 0.0,
    "pull": 0.0,
    "cells": 3,
    "lam": 0.3,
    "rho": 0.2,
    "theta": 0.5,
    "v_lr": 0.4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "joint": {"outer": "train", "serve": "own", "body": "joint", "per_cell": True, "positive": "relu"},
    "held out": {"outer": "holdout", "serve": "shrunk", "positive": "relu"},
    "own, held out": {"outer": "holdout", "serve": "own", "weights": "samples", "per_cell": True},
    "training loss of w + z": {"outer": "train", "serve": "shrunk"},
}


def federation(engine: str = "loop", task: Any = "classification", **options: Any) -> Federation:
    data = make_data(task)
    algorithm = Learn2pFedHead(**(OPEN | {"start": "fixed", "spread": 0.4} | options))
    return federate(algorithm, data, make_model("mlp", data), engine, FULL_BATCH)


def one_round(fed: Federation, rows: Tree) -> Tree:
    fed.engine.set_states(tree_map(torch.clone, rows))
    algorithm = fed.engine.experiment.algorithm
    return fed.run_round(0, range(4), algorithm.server_init(fed.model))


def outer_loss(fed: Federation, rows: Tree) -> float:
    """Of the heads that a round ends with, all in plain torch but for the cells themselves."""
    server = one_round(fed, rows)
    algorithm, data, after = fed.engine.experiment.algorithm, fed.engine.experiment.data, fed.engine.get_states()
    split = data.val if algorithm.outer == "holdout" else data.train  # type: ignore[attr-defined]
    total, count = 0.0, 0
    for i in range(4):
        x, y = split.of(i)
        mine = tree_map(lambda v, i=i: v[i], after["state"])
        head = mine["v"] if algorithm.serve == "own" else server["w"] + mine["z"]  # type: ignore[attr-defined]
        body = rows["state"]["body"] if algorithm.body == "joint" else after["state"]["body"]  # type: ignore[attr-defined]
        params = {k: v[i] for k, v in body.items()} | as_head(head, fed.model)
        if len(x):
            total += float(torch.nn.functional.cross_entropy(fed.model(params, x), y, reduction="sum"))
            count += len(x)
    return total / count


@cache
def slopes_by_learned_numbers(variant: str) -> tuple[Tree, list[tuple[Tensor, float]]]:
    """The states at which a round begins, and how its outer loss changes along some directions of the raw numbers."""
    fed = federation(**VARIANTS[variant], optimizer="sgd", epochs=1, outer_lr=0.0)
    rows = tree_map(torch.clone, fed.engine.get_states())
    generator = torch.Generator().manual_seed(0)
    raw = rows["state"]["learned"]["raw"]
    raw *= 1 + 0.2 * torch.rand(raw.shape, dtype=F64, generator=generator)  # no two alike
    rows["state"]["learned"]["steps"] += 1  # p is as it is
    found = []
    for place in [
        0,
        7,
        14,
        *range(-5, 0),
    ]:  # some of the degrees, and all scalars; of two clients and all cells at once
        direction = torch.zeros_like(raw)
        direction[[0, 3], ..., place] = torch.randn(raw[[0, 3], ..., place].shape, dtype=F64, generator=generator)
        ends = []
        for sign in (1, -1):
            learned = rows["state"]["learned"] | {"raw": raw + sign * 1e-5 * direction}
            ends.append(outer_loss(fed, rows | {"state": rows["state"] | {"learned": learned}}))
        found.append((direction, (ends[0] - ends[1]) / 2e-5))
    return rows, found


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_through_all_cells_is_finite_differences(variant: str, engine: str) -> None:
    """Of Lambda, p, rho, eta, gamma and theta of clients and cells."""
    rows, slopes = slopes_by_learned_numbers(variant)
    raw, rate = rows["state"]["learned"]["raw"], 1e-3
    fed = federation(engine, **VARIANTS[variant], optimizer="sgd", epochs=1, outer_lr=rate)
    one_round(fed, rows)
    gradient = (raw - fed.engine.get_states()["state"]["learned"]["raw"]) / rate
    assert float(gradient.norm()) < 1  # not clipped
    for direction, slope in slopes:
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-9)
    least = gradient[[0, 2, 3]].abs().amax((0, *range(1, gradient.dim() - 1)))[-5:]
    assert float(least.min()) > 1e-6  # no number is without effect


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_a_joint_body_goes_along_the_gradient_through_all_cells(engine: str) -> None:
    """Adam's moments after a round are 0.1 of the gradient and 0.001 of its square."""
    fed = federation(**VARIANTS["joint"], outer_lr=0.0)
    rows = tree_map(torch.clone, fed.engine.get_states())
    taped = federation(engine, **VARIANTS["joint"], outer_lr=0.0)
    one_round(taped, rows)
    after = taped.engine.get_states()["state"]
    generator = torch.Generator().manual_seed(1)
    for k, moment in after["first"].items():
        assert_equal(after["second"][k], 0.001 * (10 * moment) ** 2, 1e-12)
        step = 0.1 * moment / (moment.abs() + 1e-9)  # lr = 0.1
        assert_equal(after["body"][k], rows["state"]["body"][k] - step, 1e-7)
        direction = torch.randn(moment.shape, dtype=F64, generator=generator)
        ends = []
        for sign in (1, -1):
            body = rows["state"]["body"] | {k: rows["state"]["body"][k] + sign * 1e-5 * direction}
            ends.append(outer_loss(fed, rows | {"state": rows["state"] | {"body": body}}))
        wanted = (ends[0] - ends[1]) / 2e-5
        assert 10 * float((moment * direction).sum()) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_a_round_of_two_cells_by_hand() -> None:
    """(14): one step on F + rho/2 |v - (w + z + a)|^2; after local epochs of the body under v."""
    data = make_data(names=("ada", "di"))
    model = make_model("mlp", data)
    algorithm = Learn2pFedHead(outer_lr=0.0, cells=2, lam=0.3, rho=0.2, theta=0.5, v_lr=0.4, epochs=2)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    server = run(fed, rounds=1)
    first = column(model.head)
    w, v, z, a = first, [first, first], [0 * first] * 2, [0 * first] * 2
    bodies = [descend(model, model.body, *data.train.of(i), steps=2, frozen=model.head) for i in range(2)]
    for _ in range(2):
        sent = []
        for i in range(2):
            a[i] = a[i] + 0.5 * (z[i] - v[i] + w)
            moved = descend(
                model, as_head(v[i], model), *data.train.of(i), steps=1, lr=0.4, frozen=bodies[i],
                center=as_head(w + z[i] + a[i], model), mu=0.2,
            )  # fmt: skip
            v[i] = column(moved)
            z[i] = 0.2 / 0.5 * (v[i] - w - a[i])
            sent.append(v[i] - z[i] - a[i])
        w = (sent[0] + sent[1]) / 2
    assert_equal(server["w"], w)
    served = {c: bodies[i] | as_head(w + z[i], model) for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), served)


def test_only_the_head_travels() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(make("learn2pfed-head", {"preset": "paper"}), data, model)
    server = run(fed)
    assert server["w"].numel() == sum(v.numel() for v in model.head.values())
    bodies = {tuple(m["hidden.0.weight"].flatten().tolist()) for m in models(fed, server).values()}
    assert len(bodies) == 4  # each its own
    rows = fed.engine.get_states()["state"]
    for i, mine in enumerate(models(fed, server).values()):
        assert_equal({k: mine[k] for k in head_of(model)}, as_head(rows["v"][i], model), 0.0)


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({}, "headless", r"model\.head"),
        ({"body": "joint"}, "mlp", 'outer = "train"'),
        ({"body": "joint", "outer": "train"}, "normed", 'body = "epochs"'),
        ({"weights": "samples", "learned": ("p",)}, "mlp", "reach = 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Learn2pFedHead(**options).check(make_model(model, make_data()), "classification")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_absent_client_keeps_its_cells(engine: str) -> None:
    fed = federation(engine, **VARIANTS["joint"])
    before = tree_map(torch.clone, fed.engine.get_states()["state"])
    fed.run_round(0, [0, 2], fed.engine.experiment.algorithm.server_init(fed.model))
    after = fed.engine.get_states()["state"]
    for (path, old), (_, new) in zip(items(before), items(after), strict=True):
        assert torch.equal(old[[1, 3]], new[[1, 3]]), path
    assert not torch.equal(before["v"][0], after["v"][0])
