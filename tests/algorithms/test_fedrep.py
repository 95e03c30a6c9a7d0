"""FedRep by hand, and with one of its halves switched off."""

import pytest

from fedtailor.algorithms.fedrep import FedRep
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
    body, heads = model.body, [model.head] * 4
    for _ in range(rounds):
        heads = [descend(model, heads[i], *data.train.of(i), steps=3, frozen=body) for i in range(4)]
        bodies = [descend(model, body, *data.train.of(i), steps=2, frozen=heads[i]) for i in range(4)]
        body = weighted(bodies, [9, 1, 6, 13])
    fed = federate(FedRep(head_epochs=3, body_epochs=2), data, model, solver=FULL_BATCH)
    server = run(fed, rounds)
    assert_equal(server, body)
    assert_equal(models(fed, server), {name: body | heads[i] for i, name in enumerate(data.clients)})


def test_without_head_epochs_the_head_stays() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedRep(head_epochs=0), data, model)
    server = run(fed)
    for mine in states(fed).values():
        assert_equal(mine["state"], model.head, tolerance=0)
    assert float((server["hidden.0.weight"] - model.body["hidden.0.weight"]).abs().max()) > 1e-3


def test_without_body_epochs_the_body_stays() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedRep(body_epochs=0, head_epochs=2), data, model)
    assert_equal(run(fed), model.body, 1e-15)
    moved = [mine["state"]["out.bias"] - model.head["out.bias"] for mine in states(fed).values()]
    assert min(float(m.abs().max()) for m in moved) > 1e-3
