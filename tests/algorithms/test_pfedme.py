"""pFedMe by hand; FedProx and Local are special cases."""

import pytest

from fedtailor.algorithms.fedprox import FedProx
from fedtailor.algorithms.local import Local
from fedtailor.algorithms.pfedme import PFedMe
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    ENGINES,
    EVEN_SIZES,
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
    w, thetas = model.params, [model.params] * 4
    for _ in range(rounds):
        moved: list[Params] = []
        for i in range(4):
            mine = theta = w
            for _ in range(3):
                theta = descend(model, theta, *data.train.of(i), steps=2, center=mine, mu=0.7)
                mine = {k: mine[k] - 0.4 * 0.7 * (mine[k] - theta[k]) for k in mine}
            thetas[i] = theta
            moved.append(mine)
        mean = weighted(moved, [1, 1, 1, 1])  # everybody counts the same
        w = {k: (1 - 0.6) * w[k] + 0.6 * mean[k] for k in w}
    algorithm = PFedMe(local_rounds=3, epochs=2, lam=0.7, eta=0.4, beta=0.6)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    server = run(fed, rounds)
    assert_equal(server, w)
    assert_equal(models(fed, server), dict(zip(data.clients, thetas, strict=True)))


@pytest.mark.parametrize("engine", ENGINES)
def test_one_full_step_of_equal_clients_is_fedprox(engine: str) -> None:
    data = make_data(sizes=dict.fromkeys(("ada", "bo", "cy"), (9, 3, 4)))
    pfedme = federate(PFedMe(local_rounds=1, epochs=2, lam=0.5, eta=2.0), data, make_model("mlp", data), engine)
    prox = federate(FedProx(epochs=2, mu=0.5), data, make_model("mlp", data))
    assert_equal(run(pfedme), run(prox))


def test_without_pull_a_round_is_one_of_local() -> None:
    data = make_data()
    model = make_model("mlp", data)
    pfedme = federate(PFedMe(local_rounds=3, epochs=2, lam=0.0), data, model, solver=FULL_BATCH)
    local = federate(Local(epochs=6), data, model, solver=FULL_BATCH)
    server = run(pfedme, rounds=1)
    assert_equal(models(pfedme, server), models(local, run(local, rounds=1)))
    assert_equal(server, model.params)  # nothing moves the common model


def test_averaged_variances_cannot_become_negative() -> None:
    data = make_data(sizes=EVEN_SIZES)
    PFedMe(beta=2.0).check(make_model("normed", data, "private"), data.task)
    PFedMe(beta=1.0).check(make_model("normed", data, "mean"), data.task)
    with pytest.raises(ConfigError, match=r"algorithm\.beta.*\b1\b"):
        PFedMe(beta=2.0).check(make_model("normed", data, "mean"), data.task)
