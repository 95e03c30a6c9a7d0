"""FedAvg+FT by hand, and without fine-tuning."""

from fedtailor.algorithms.fedavg_ft import FedAvgFT
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
    fed = federate(FedAvgFT(epochs=2, tune_epochs=3), data, model, solver=FULL_BATCH)
    w = weighted([descend(model, model.params, *data.train.of(i), steps=2) for i in range(4)], [9, 1, 6, 13])
    server = run(fed, rounds=1)
    assert_equal(server, w)
    tuned = {name: descend(model, w, *data.train.of(i), steps=3) for i, name in enumerate(data.clients)}
    assert_equal(models(fed, server), tuned)


def test_fine_tuning_leaves_no_trace() -> None:
    data = make_data()
    fed = federate(FedAvgFT(), data, make_model("mlp", data))
    server = run(fed, rounds=1)
    assert_equal(models(fed, server), models(fed, server), tolerance=0)
