"""FedProx+FT by hand, and without fine-tuning."""

from fedtailor.algorithms.fedprox_ft import FedProxFT
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


def test_a_round_by_hand() -> None:
    data = make_data()
    model = make_model("mlp", data)
    w = model.params
    fed = federate(FedProxFT(epochs=2, mu=0.8, tune_epochs=3), data, model, solver=FULL_BATCH)
    trained = [descend(model, w, *data.train.of(i), steps=2, center=w, mu=0.8) for i in range(4)]
    server = run(fed, rounds=1)
    assert_equal(server, weighted(trained, [9, 1, 6, 13]))
    tuned = {name: descend(model, server, *data.train.of(i), steps=3) for i, name in enumerate(data.clients)}
    assert_equal(models(fed, server), tuned)
