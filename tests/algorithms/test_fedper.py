"""FedPer by hand; its ends are FedAvg (nothing is head) and Local (all is head)."""

import pytest

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedper import FedPer
from fedtailor.algorithms.local import Local
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
    body, heads = model.body, [model.head] * 4
    for _ in range(rounds):
        both = [descend(model, body | heads[i], *data.train.of(i), steps=2) for i in range(4)]
        body = weighted([{k: w[k] for k in body} for w in both], [9, 1, 6, 13])
        heads = [{k: w[k] for k in model.head} for w in both]
    fed = federate(FedPer(epochs=2), data, model, solver=FULL_BATCH)
    server = run(fed, rounds)
    assert_equal(server, body)
    assert_equal(models(fed, server), {name: body | heads[i] for i, name in enumerate(data.clients)})


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_head_it_is_fedavg(engine: str) -> None:
    data = make_data()
    model = Model(make_model("mlp", data).module)
    per, avg = federate(FedPer(), data, model, engine), federate(FedAvg(), data, model, engine)
    assert_equal(everything(per, run(per)), everything(avg, run(avg)), tolerance=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_when_all_is_head_it_is_local(engine: str) -> None:
    data = make_data()
    model = make_model("linear", data)
    assert model.body == {}
    per, local = federate(FedPer(), data, model, engine), federate(Local(), data, model, engine)
    assert_equal(everything(per, run(per)), everything(local, run(local)), tolerance=0)
