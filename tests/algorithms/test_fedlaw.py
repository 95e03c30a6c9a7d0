"""FedLAW against one graph over everybody's validation data; without steps of the server it is FedAvg."""

from math import exp

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedtailor.algorithms.fedlaw import FedLAW
from fedtailor.core.trees import Params
from tests.helpers import (
    ENGINES,
    F64,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
)

N = torch.tensor([9, 1, 6, 13], dtype=F64)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shrink", [True, False])
def test_rounds_by_hand(shrink: bool, engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    w = model.params
    for _ in range(2):
        trained = [descend(model, w, *data.train.of(i), steps=2) for i in range(4)]
        x = N.log().requires_grad_()
        y = torch.zeros((), dtype=F64, requires_grad=shrink)

        def average(trained: list[Params] = trained, x: Tensor = x, y: Tensor = y) -> Params:
            share = x.exp() / x.exp().sum()
            return {
                k: y.exp() * torch.stack([share[i] * m[k] for i, m in enumerate(trained)]).sum(0) for k in model.params
            }

        optimizer = torch.optim.Adam([x, y], lr=0.2)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(average(), data.val.x), data.val.y).backward()  # all validation samples together
            optimizer.step()
        w = {k: v.detach() for k, v in average().items()}
    fed = federate(FedLAW(epochs=2, server_steps=3, server_lr=0.2, shrink=shrink), data, model, engine, FULL_BATCH)
    server = run(fed, 2)
    assert_equal(server, w)
    assert_equal(models(fed, server)["di"], w)
    assert (fed.record.reported["gamma"] == 1) is not shrink
    assert fed.record.gathered == {"model of each client", "sample counts"}


def test_statistics_are_averaged_and_not_shrunk() -> None:
    model = make_model("normed", make_data(), "mean")
    two = {k: torch.stack([v, 3 * v]) for k, v in model.params.items()}
    found = FedLAW().average(model, two, torch.tensor([0.0, 0.0, -1.0], dtype=F64))
    assert_equal(found, {k: 2 * v * (exp(-1) if k in model.trainable else 1) for k, v in model.params.items()})
    assert model.has_common_statistics
