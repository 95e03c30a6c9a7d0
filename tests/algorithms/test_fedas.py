"""FedAS by hand; without alignment and with sample counts its body is FedPer's."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedtailor.algorithms.fedas import FedAS
from fedtailor.algorithms.fedper import FedPer
from fedtailor.core.client import onboard
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    ENGINES,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
    weighted,
)


def features(params: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ params["hidden.0.weight"].T + params["hidden.0.bias"])


def aligned(body: Params, own: Params, x: Tensor, y: Tensor, steps: int, lr: float) -> Params:
    target = torch.stack([features(own, x)[y == label].mean(0) for label in y])
    for _ in range(steps):
        leaf = {k: v.clone().requires_grad_() for k, v in body.items()}
        (features(leaf, x) - target).square().mean().backward()
        body = {k: (v - lr * v.grad).detach() for k, v in leaf.items()}  # type: ignore[operator]
    return body


def trace(model: Model, params: Params, x: Tensor, y: Tensor) -> float:
    total = 0.0
    for i in range(len(x)):
        leaf = {k: v.clone().requires_grad_() for k, v in params.items()}
        cross_entropy(torch.func.functional_call(model.module, leaf, (x[i : i + 1],)), y[i : i + 1]).backward()
        total += sum(float(v.grad.square().sum()) for v in leaf.values())  # type: ignore[misc, union-attr]
    return total / len(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    body, own = model.body, [model.params] * 4
    for _ in range(2):
        start = [aligned(body, own[i], *data.train.of(i), steps=3, lr=0.2) for i in range(4)]
        whole = [start[i] | {k: own[i][k] for k in model.head} for i in range(4)]
        own = [descend(model, whole[i], *data.train.of(i), steps=2) for i in range(4)]
        shares = [trace(model, own[i], *data.train.of(i)) for i in range(4)]
        body = weighted([{k: w[k] for k in body} for w in own], shares)  # type: ignore[arg-type]
    fed = federate(FedAS(epochs=2, align_epochs=3, align_lr=0.2), data, model, engine, FULL_BATCH)
    server = run(fed, 2)
    assert_equal(server, body)
    assert_equal(models(fed, server), dict(zip(data.clients, own, strict=True)))
    assert fed.record.gathered == set()


def test_without_alignment_the_body_is_fedpers() -> None:
    data = make_data()
    ours, other = (
        federate(a, data, make_model("mlp", data)) for a in (FedAS(align_epochs=0, weights="samples"), FedPer())
    )
    assert_equal(run(ours), run(other))


def test_a_newcomer_gets_the_common_body() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedAS(), data, model, solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    head = descend(model, model.head, *data.train.of(3), steps=4, frozen=server)
    assert_equal(onboard(fed.engine.experiment, 3, server, 4), server | head)


def test_what_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="does not serve regression"):
        FedAS().check(make_model("mlp", make_data()), "regression")
    with pytest.raises(ConfigError, match=r"model\.head"):
        FedAS().check(Model(torch.nn.Linear(2, 2)), "classification")
