"""FedALA by hand; without blended layers, or without steps of the weights, it is FedAvg."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.fedala import FedALA, draw_share, last_layers
from fedtailor.core.client import shares
from fedtailor.core.random import stream
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from fedtailor.training.solver import Solver
from tests.helpers import (
    F64,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)

LAST = ("out.weight", "out.bias")


def output(params: Params, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ params["hidden.0.weight"].T + params["hidden.0.bias"])
    return hidden @ params["out.weight"].T + params["out.bias"]


def blended(
    common: Params, own: Params, weights: Params, x: Tensor, y: Tensor, steps: int
) -> tuple[Params, Params, int]:
    """The paper's weight learning, one after the other, with autograd on the parameters as the authors do it."""
    losses: list[float] = []
    taken = 0
    for _ in range(steps):
        mixed = common | {k: own[k] + (common[k] - own[k]) * weights[k] for k in LAST}
        leaf = {k: v.clone().requires_grad_() for k, v in mixed.items()}
        loss = (output(leaf, x) - y).square().mean()
        loss.backward()
        slope: dict[str, Any] = {k: leaf[k].grad for k in LAST}
        weights = {k: (weights[k] - 3.0 * slope[k] * (common[k] - own[k])).clamp(0, 1) for k in LAST}
        losses.append(float(loss.detach()))
        taken += 1
        if len(losses) > 10 and np.std(losses[-10:]) < 0.005:
            break
    return common | {k: own[k] + (common[k] - own[k]) * weights[k] for k in LAST}, weights, taken


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    common, own = model.params, [model.params] * 4
    weights = [{k: torch.ones_like(v) for k, v in model.params.items() if k in LAST}] * 4
    taken = []
    for number in range(3):
        for i in range(4):
            x, y = data.train.of(i)
            start, weights[i], steps = blended(common, own[i], weights[i], x, y, 25 if number == 1 else 1)
            own[i] = descend(model, start, x, y, steps=2)
            taken += [steps] if number == 1 else []
        common = weighted(own, [9, 1, 6, 13])
    assert len(set(taken)) > 1  # some settle before others
    algorithm = FedALA(epochs=2, share=1.0, eta=3.0, first_passes=25, threshold=0.005)
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server["common"], common)
    for i, mine in enumerate(states(fed).values()):
        assert_equal(mine["state"], {"theta": {k: own[i][k] for k in LAST}, "W": weights[i]})
    assert float(torch.stack([w["out.weight"] for w in weights]).std()) > 0.01  # learned
    wanted = {n: blended(common, own[i], weights[i], *data.train.of(i), 1)[0] for i, n in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_weights_are_learned_batch_by_batch(engine: str) -> None:
    """A round by hand with batches of 4: one step of W for each of them, on a share of the samples."""
    data = make_data("regression")
    model = make_model("mlp", data)
    solver = Solver(lr=0.1, batch_size=4)
    algorithm = FedALA(share=0.7, eta=3.0, first_passes=2)
    fed = federate(algorithm, data, model, engine, solver)
    server = fed.run_round(0, range(4), algorithm.server_init(model))
    before = states(fed)
    fed.run_round(1, range(4), server)
    after = states(fed)
    for i, (name, count) in enumerate([("ada", 9), ("bo", 1), ("cy", 6), ("di", 13)]):
        x, y = data.train.of(i)
        drawn = torch.from_numpy(stream(3, 1, 0, name, "uniform", 0).random(count))
        chosen = drawn.argsort()[: int(np.ceil(0.7 * count))]
        W = before[name]["state"]["W"]
        for _ in range(2):
            for rows in chosen.split(4):
                _, W, _ = blended(server["common"], before[name]["state"]["theta"], W, x[rows], y[rows], 1)
        assert_equal(after[name]["state"]["W"], W)


def test_last_layers() -> None:
    model = make_model("normed", make_data())
    assert list(last_layers(model, 0)) == []
    assert sorted(last_layers(model, 1)) == ["out.bias", "out.weight"]
    assert sorted({k.partition(".")[0] for k in last_layers(model, 2)}) == ["norm", "out"]
    assert set(last_layers(model, 9)) == set(model.trainable)


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.5, 3), (0.8, 4), (1.0, 5)])
def test_a_share_of_the_samples_is_drawn(share: float, count: int) -> None:
    order = torch.tensor([0.9, 0.1, 0.5, 0.7, 0.3, 0.0, 0.0], dtype=F64)
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 0], dtype=F64)
    rows, chosen = draw_share(order, mask, share)
    assert rows[:5].tolist() == [1, 4, 2, 3, 0]
    assert chosen.nonzero()[:, 0].tolist() == sorted([1, 4, 2, 3, 0][:count])


def test_the_weights_are_the_shares() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    fed = federate(FedALA(eta=5.0), data, model)
    server = run(fed)
    mine = states(fed)["di"]
    common, _ = shares(fed.engine.experiment, 3, mine["state"], mine["buffers"], server)
    assert_equal({k: common[k] for k in LAST}, mine["state"]["W"], 0)
    assert bool((common["hidden.0.weight"] == 1).all())
    assert bool((common["out.weight"] < 1).any())


def test_mistakes() -> None:
    model = make_model("mlp", make_data())
    for wrong in (FedALA(layers=-1), FedALA(share=0.0), FedALA(share=1.5), FedALA(first_passes=0)):
        with pytest.raises(ConfigError, match="FedALA needs layers"):
            wrong.check(model, "classification")
