"""APFL by hand; with its share held at 0 it is FedAvg, at 1 Local."""

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.apfl import APFL
from fedtailor.core.client import shares
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    F64,
    FULL_BATCH,
    assert_equal,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)


def slopes(model: Model, params: Params, x: Tensor, y: Tensor) -> Params:
    """The gradient of the mean squared error."""
    leaf = {k: v.clone().requires_grad_() for k, v in params.items()}
    (torch.func.functional_call(model.module, leaf, (x,)) - y).square().mean().backward()
    return {k: v.grad for k, v in leaf.items() if v.grad is not None}


def dot(a: Params, b: Params) -> Tensor:
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    w, v, alpha = model.params, [model.params] * 4, [torch.tensor(0.4, dtype=F64)] * 4
    for _ in range(3):
        trained = []
        for i in range(4):
            x, y = data.train.of(i)
            bar = {k: alpha[i] * v[i][k] + (1 - alpha[i]) * w[k] for k in w}
            apart = {k: v[i][k] - w[k] for k in w}
            alpha[i] = (alpha[i] - 0.7 * dot(apart, slopes(model, bar, x, y))).clamp(0, 1)
            own_w, own_v = w, v[i]
            for _ in range(2):
                bar = {k: alpha[i] * own_v[k] + (1 - alpha[i]) * own_w[k] for k in w}
                of_w, of_bar = slopes(model, own_w, x, y), slopes(model, bar, x, y)
                own_w = {k: own_w[k] - 0.1 * of_w[k] for k in w}
                own_v = {k: own_v[k] - 0.1 * alpha[i] * of_bar[k] for k in w}
            v[i] = own_v
            trained.append(own_w)
        w = weighted(trained, [9, 1, 6, 13])
    fed = federate(APFL(epochs=2, alpha=0.4, alpha_lr=0.7), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server, w)
    wanted = {name: {"v": v[i], "alpha": alpha[i]} for i, name in enumerate(data.clients)}
    assert_equal({name: s["state"] for name, s in states(fed).items()}, wanted)
    bars = [{k: alpha[i] * v[i][k] + (1 - alpha[i]) * w[k] for k in w} for i in range(4)]
    assert_equal(models(fed, server), dict(zip(data.clients, bars, strict=True)))
    assert len({round(float(a), 6) for a in alpha} - {0.0, 0.4, 1.0}) > 1  # learned, and each its own


def test_the_share_goes_where_the_loss_falls() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    fed = federate(APFL(alpha_lr=0.05, epochs=3), data, model, solver=FULL_BATCH)
    server = run(fed, rounds=6)  # own models fit their few samples better than the common one
    assert all(float(s["state"]["alpha"]) > 0.5 for s in states(fed).values())
    mine = states(fed)["cy"]
    common, _ = shares(fed.engine.experiment, 2, mine["state"], mine["buffers"], server)
    assert_equal(common, {k: (1 - mine["state"]["alpha"]).expand_as(v) for k, v in model.params.items()})


def test_a_share_is_between_0_and_1() -> None:
    data = make_data()
    with pytest.raises(ConfigError, match=r"algorithm\.alpha = 1\.5"):
        APFL(alpha=1.5).check(make_model("mlp", data), data.task)
    fed = federate(APFL(alpha_lr=1e3, epochs=3), data, make_model("mlp", data))
    run(fed)
    assert all(0 <= float(s["state"]["alpha"]) <= 1 for s in states(fed).values())
