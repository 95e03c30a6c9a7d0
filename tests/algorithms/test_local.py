"""Local by hand; nothing is sent."""

import pytest

from fedtailor.algorithms.local import Local
from fedtailor.core import codec
from tests.helpers import ENGINES, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run


def test_rounds_by_hand() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(Local(epochs=2), data, model, solver=FULL_BATCH)
    server = run(fed, rounds=3)
    assert server == {}
    wanted = {name: descend(model, model.params, *data.train.of(i), steps=6) for i, name in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_tensor_is_sent(engine: str) -> None:
    data = make_data()
    small, large = make_model("linear", data), make_model("mlp", data)
    feds = [federate(Local(), data, model, engine) for model in (small, large)]
    for fed in feds:
        run(fed)
    # messages without tensors: their size does not depend on the model, and is that of a message of nothing
    assert feds[0].traffic == feds[1].traffic
    assert feds[0].traffic.up == sum(4 * len(codec.encode({"round": r, "call": 0}, None)) for r in range(3))


def test_no_client_knows_of_another() -> None:
    everyone, alone = make_data(), make_data(names=["cy"])
    a = federate(Local(), everyone, make_model("mlp", everyone))
    b = federate(Local(), alone, make_model("mlp", alone))
    assert_equal(models(a, run(a))["cy"], models(b, run(b))["cy"], tolerance=0)
