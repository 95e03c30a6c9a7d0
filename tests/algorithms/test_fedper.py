"""FedPer by hand; its ends are FedAvg (nothing is head) and Local (all is head)."""

import pytest

from fedtailor.algorithms.fedper import FedPer
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
    body, heads = model.body, [model.head] * 4
    for _ in range(rounds):
        both = [descend(model, body | heads[i], *data.train.of(i), steps=2) for i in range(4)]
        body = weighted([{k: w[k] for k in body} for w in both], [9, 1, 6, 13])
        heads = [{k: w[k] for k in model.head} for w in both]
    fed = federate(FedPer(epochs=2), data, model, solver=FULL_BATCH)
    server = run(fed, rounds)
    assert_equal(server, body)
    assert_equal(models(fed, server), {name: body | heads[i] for i, name in enumerate(data.clients)})
