"""Ditto by hand; without its pull the personal models are those of Local."""

import pytest

from fedtailor.algorithms.ditto import Ditto
from fedtailor.algorithms.fedavg import FedAvg
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
    data = make_data("regression")
    model = make_model("mlp", data)
    fed = federate(Ditto(epochs=2, personal_epochs=3, lam=0.7), data, model, solver=FULL_BATCH)
    w, v = model.params, [model.params] * 4
    for _ in range(rounds):
        v = [descend(model, v[i], *data.train.of(i), steps=3, center=w, mu=0.7) for i in range(4)]  # w of the server
        w = weighted([descend(model, w, *data.train.of(i), steps=2) for i in range(4)], [9, 1, 6, 13])
    server = run(fed, rounds)
    assert_equal(server, w)
    assert_equal(models(fed, server), dict(zip(data.clients, v, strict=True)))


def test_the_common_model_is_fedavgs() -> None:
    data = make_data()
    ditto = federate(Ditto(lam=3.0), data, make_model("mlp", data), solver=FULL_BATCH)
    plain = federate(FedAvg(), data, make_model("mlp", data), solver=FULL_BATCH)
    assert_equal(run(ditto), run(plain), 1e-15)


def test_a_strong_pull_holds_the_personal_model_at_the_common_one() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(Ditto(lam=9.0, personal_epochs=60), data, model, solver=FULL_BATCH)  # lr * lam < 2
    run(fed, rounds=1)
    for mine in models(fed, model.params).values():
        assert max(float((mine[k] - v).abs().max()) for k, v in model.params.items()) < 0.15
