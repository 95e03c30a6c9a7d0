"""LG-FedAvg by hand; with all private it is Local, with all shared FedAvg."""

import pytest
import torch

from fedtailor.algorithms.lg_fedavg import LGFedAvg
from fedtailor.core.client import shares
from tests.helpers import (
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


@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_by_hand(rounds: int) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    head, bodies = model.head, [model.body] * 4
    for _ in range(rounds):
        trained = [descend(model, bodies[i] | head, *data.train.of(i), steps=2) for i in range(4)]
        bodies = [{k: w[k] for k in model.body} for w in trained]
        head = weighted([{k: w[k] for k in head} for w in trained], [9, 1, 6, 13])
    fed = federate(LGFedAvg(epochs=2), data, model, solver=FULL_BATCH)
    server = run(fed, rounds)
    assert_equal(server, head)
    assert_equal(
        {name: mine["state"] for name, mine in states(fed).items()}, dict(zip(data.clients, bodies, strict=True))
    )
    assert_equal(models(fed, server), {name: bodies[i] | head for i, name in enumerate(data.clients)})


def test_only_the_head_is_common() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(LGFedAvg(), data, model)
    found, _ = shares(fed.engine.experiment, 0, model.body, {}, model.head)
    assert_equal(found, {k: torch.full_like(v, float(k in model.head)) for k, v in model.params.items()})
