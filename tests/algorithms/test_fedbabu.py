"""FedBABU by hand; the head never moves before fine-tuning; without a head it is FedAvg+FT."""

import pytest

from fedtailor.algorithms.fedavg_ft import FedAvgFT
from fedtailor.algorithms.fedbabu import FedBABU
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.model import Model
from tests.helpers import (
    ENGINES,
    FULL_BATCH,
    assert_equal,
    descend,
    everything,
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


def test_without_fine_tuning_it_is_fedrep_without_head_epochs() -> None:
    data = make_data()
    model = make_model("mlp", data)
    babu = federate(FedBABU(epochs=2, tune_epochs=0), data, model, solver=FULL_BATCH)
    rep = federate(FedRep(head_epochs=0, body_epochs=2), data, model, solver=FULL_BATCH)
    found = models(babu, run(babu))
    assert_equal(found, models(rep, run(rep)))
    for mine in found.values():
        assert_equal({k: mine[k] for k in model.head}, model.head, tolerance=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_head_it_is_fedavg_with_fine_tuning(engine: str) -> None:
    data = make_data()
    model = Model(make_model("mlp", data).module)
    babu = federate(FedBABU(), data, model, engine)
    tuned = federate(FedAvgFT(), data, model)
    assert_equal(everything(babu, run(babu)), everything(tuned, run(tuned)))
