"""FedBABU by hand; the head never moves before fine-tuning; without a head it is FedAvg+FT."""

import pytest

from fedtailor.algorithms.fedbabu import FedBABU
from tests.helpers import (
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


@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_by_hand(rounds: int) -> None:
    data = make_data()
    model = make_model("mlp", data)
    body = model.body
    for _ in range(rounds):
        bodies = [descend(model, body, *data.train.of(i), steps=2, frozen=model.head) for i in range(4)]
        body = weighted(bodies, [9, 1, 6, 13])
    fed = federate(FedBABU(epochs=2, tune_epochs=3), data, model, solver=FULL_BATCH)
    server = run(fed, rounds)
    assert_equal(server, body)
    tuned = {c: descend(model, body | model.head, *data.train.of(i), steps=3) for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), tuned)
