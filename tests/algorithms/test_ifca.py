"""IFCA by hand; with one cluster it is FedAvg; groups with other labels are found."""

from dataclasses import replace

import pytest
import torch

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.ifca import IFCA
from fedtailor.core.client import onboard
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.algorithms.test_cfl import accuracies, two_groups
from tests.helpers import (
    ENGINES,
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

COUNTS = [9, 1, 6, 13]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_by_hand(rounds: int, engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = IFCA(epochs=2, clusters=3)
    first = algorithm.server_init(model)
    theta = [{k: v[j] for k, v in first.items()} for j in range(3)]

    def best(i: int) -> int:
        x, y = data.train.of(i)
        return min(range(3), key=lambda j: float(torch.nn.functional.cross_entropy(model(theta[j], x), y)))

    for _ in range(rounds):
        at = [best(i) for i in range(4)]
        trained = [descend(model, theta[j], *data.train.of(i), steps=2) for i, j in enumerate(at)]
        for j in set(at):
            who = [i for i in range(4) if at[i] == j]
            theta[j] = weighted([trained[i] for i in who], [COUNTS[i] for i in who])
    assert len({best(i) for i in range(4)}) > 1  # else it would be FedAvg
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, rounds)
    assert_equal(server, {k: torch.stack([t[k] for t in theta]) for k in first})
    assert_equal(models(fed, server), {name: theta[best(i)] for i, name in enumerate(data.clients)})
    assert fed.record.gathered == set()


def test_first_models_are_alike_but_not_equal() -> None:
    model = make_model("normed", make_data(), "mean")
    first = IFCA(clusters=4).server_init(model)
    assert_equal({k: v[0] for k, v in first.items()}, model.params, tolerance=0)
    for v in first.values():
        assert_equal(v.flatten(1).sort(1).values, v[:1].flatten(1).sort(1).values.expand(4, -1), tolerance=0)
    assert len({tuple(v.tolist()) for v in first["first.weight"].flatten(1)}) == 4


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_two_groups_are_found(engine: str) -> None:
    data, model = two_groups()
    fed = federate(IFCA(epochs=2), data, model, engine)
    server = run(fed, 30)
    found: list[Params] = list(models(fed, server).values())
    assert_equal(found[0], found[2], tolerance=0)
    assert_equal(found[1], found[5], tolerance=0)
    assert max(float((found[0][k] - found[1][k]).abs().max()) for k in found[0]) > 0.1
    one = federate(FedAvg(epochs=2), data, model)
    assert min(accuracies(fed, server)) > 0.8 > max(accuracies(one, run(one, 30)))


def test_a_newcomer_joins_the_cluster_that_fits_it() -> None:
    data, model = two_groups()
    fed = federate(IFCA(epochs=2), data, model)
    server = run(fed, 30, cohort=[0, 1, 2, 3])
    for new, like in ((4, "a"), (5, "b")):
        assert_equal(onboard(fed.engine.experiment, new, server, 4), models(fed, server)[like], tolerance=0)


def test_no_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.clusters"):
        replace(IFCA(), clusters=0).check(make_model("mlp", make_data()), "classification")
