"""FedRoD by hand; without balance its common model is FedAvg's."""

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedrod import BIAS, WEIGHT, FedRoD
from fedtailor.core.client import onboard
from fedtailor.core.model import BufferPolicy, Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    EVEN_SIZES,
    F64,
    FULL_BATCH,
    assert_equal,
    evaluate,
    federate,
    make_data,
    make_model,
    models,
    run,
    weighted,
)


def generic(w: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    f = torch.relu(x @ w["hidden.0.weight"].T + w["hidden.0.bias"])
    return f, f @ w["out.weight"].T + w["out.bias"]


def balanced_step(w: Params, x: Tensor, y: Tensor, gamma: float) -> Params:
    """One sample after the other: minus the log of N_y^gamma e^g_y over the sum of N_c^gamma e^g_c."""
    leaf = {k: v.clone().requires_grad_() for k, v in w.items()}
    _, g = generic(leaf, x)
    loss = torch.zeros((), dtype=F64)
    for row, label in zip(g, y.tolist(), strict=True):
        terms = [float((y == c).sum()) ** gamma * row[c].exp() for c in range(3)]
        loss = loss - (terms[label] / torch.stack(terms).sum()).log() / len(y)
    loss.backward()
    return {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}


def personal_step(w: Params, head: Params, x: Tensor, y: Tensor) -> Params:
    leaf = {k: v.clone().requires_grad_() for k, v in head.items()}
    f, g = generic(w, x)
    nn.functional.cross_entropy(g + f @ leaf[WEIGHT].T + leaf[BIAS], y).backward()
    return {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str, gamma: float) -> None:
    data = make_data()  # bo has a single sample, so two classes that it has none of
    model = make_model("mlp", data)
    w = model.params
    heads = [{WEIGHT: torch.zeros(3, 5, dtype=F64), BIAS: torch.zeros(3, dtype=F64)} for _ in range(4)]
    for _ in range(2):
        trained = []
        for i in range(4):
            x, y = data.train.of(i)
            own = w
            for _ in range(2):
                heads[i] = personal_step(own, heads[i], x, y)
                own = balanced_step(own, x, y, gamma)
            trained.append(own)
        w = weighted(trained, [9, 1, 6, 13])
    fed = federate(FedRoD(epochs=2, gamma=gamma), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, w)
    found, metrics = evaluate(fed, server)
    assert_equal(found, {name: w | heads[i] for i, name in enumerate(data.clients)})
    for i, name in enumerate(data.clients):
        x, y = data.train.of(i)
        f, g = generic(w, x)
        wanted = nn.functional.cross_entropy(g + f @ heads[i][WEIGHT].T + heads[i][BIAS], y)
        assert_equal(metrics[name]["train/loss"], wanted)


@pytest.mark.parametrize("buffers", ["private", "mean"])
@pytest.mark.parametrize("kind", ["mlp", "normed"])
def test_without_balance_the_common_model_is_fedavgs(kind: str, buffers: BufferPolicy) -> None:
    data = make_data(sizes=EVEN_SIZES)
    ours = federate(FedRoD(gamma=0.0, epochs=2), data, make_model(kind, data, buffers))
    plain = federate(FedAvg(epochs=2), data, make_model(kind, data, buffers))
    found, wanted = run(ours), run(plain)
    assert_equal(found, wanted, 1e-14)
    mine, theirs = models(ours, found), models(plain, wanted)
    assert_equal({name: {k: mine[name][k] for k in theirs[name]} for name in mine}, theirs, 1e-14)
    assert all(float(m[WEIGHT].abs().max()) > 1e-3 for m in mine.values())


def test_a_newcomer_trains_its_own_head_only() -> None:
    data = make_data()
    fed = federate(FedRoD(), data, make_model("mlp", data), solver=FULL_BATCH)
    w = run(fed, cohort=[0, 1, 2])
    head = {WEIGHT: torch.zeros(3, 5, dtype=F64), BIAS: torch.zeros(3, dtype=F64)}
    for _ in range(4):
        head = personal_step(w, head, *data.train.of(3))
    assert_equal(onboard(fed.engine.experiment, 3, w, 4), w | head)


def test_what_it_does_not_serve() -> None:
    data = make_data("regression")
    with pytest.raises(ConfigError, match=r"FedRoD .*regression"):
        FedRoD().check(make_model("mlp", data), data.task)
    with pytest.raises(ConfigError, match=r"model\.head.*FedRoD"):
        FedRoD().check(Model(nn.Linear(4, 3)), "classification")
