"""MR-MTL by hand; without its pull it is Local, with a strong one all models are one."""

import pytest

from fedtailor.algorithms.mr_mtl import MRMTL
from fedtailor.core.client import onboard
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


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    mean, own = model.params, [model.params] * 4
    for _ in range(3):
        own = [descend(model, own[i], *data.train.of(i), steps=2, center=mean, mu=0.7) for i in range(4)]
        mean = weighted(own, [1, 1, 1, 1])
    fed = federate(MRMTL(epochs=2, lam=0.7), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server, mean)
    assert_equal(models(fed, server), dict(zip(data.clients, own, strict=True)))


def test_a_strong_pull_makes_all_models_one() -> None:
    data = make_data()
    apart = []
    for lam in (0.1, 1.0, 9.0):  # lr * lam < 2
        fed = federate(MRMTL(lam=lam, epochs=20), data, make_model("mlp", data), solver=FULL_BATCH)
        server = run(fed, rounds=3)
        own = models(fed, server).values()
        apart.append(max(float((mine[k] - server[k]).abs().max()) for mine in own for k in server))
    assert apart[0] > 2 * apart[1] > 4 * apart[2]


def test_a_newcomer_trains_near_the_mean() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    fed = federate(MRMTL(lam=0.7), data, model, solver=FULL_BATCH)
    mean = run(fed, cohort=[0, 1, 2])
    wanted = descend(model, mean, *data.train.of(3), steps=4, center=mean, mu=0.7)
    assert_equal(onboard(fed.engine.experiment, 3, mean, 4), wanted)
