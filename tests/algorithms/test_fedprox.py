"""FedProx by hand, and its two ends."""

import pytest

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedprox import FedProx
from tests.helpers import FULL_BATCH, assert_equal, descend, federate, make_data, make_model, run, weighted


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_a_round_by_hand(mu: float) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    w = model.params
    trained = [descend(model, w, *data.train.of(i), steps=3, center=w, mu=mu) for i in range(4)]
    server = run(federate(FedProx(epochs=3, mu=mu), data, model, solver=FULL_BATCH), rounds=1)
    assert_equal(server, weighted(trained, [9, 1, 6, 13]))


def test_the_first_step_knows_nothing_of_mu() -> None:
    data = make_data()
    prox = federate(FedProx(mu=5.0), data, make_model("mlp", data), solver=FULL_BATCH)
    plain = federate(FedAvg(), data, make_model("mlp", data), solver=FULL_BATCH)
    assert_equal(run(prox), run(plain), 1e-15)


def test_a_larger_mu_stays_nearer() -> None:
    data = make_data()
    model = make_model("mlp", data)

    def distance(mu: float) -> float:
        server = run(federate(FedProx(epochs=5, mu=mu), data, model), rounds=1)
        return sum(float(((server[k] - v) ** 2).sum()) for k, v in model.params.items())

    assert distance(5.0) < distance(0.5) < distance(0.0)
