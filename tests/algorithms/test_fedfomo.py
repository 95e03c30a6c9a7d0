"""FedFomo by hand; with nobody to download from, and training that helps, it is Local; likes find each other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedtailor.algorithms.fedfomo import FedFomo
from fedtailor.algorithms.local import Local
from fedtailor.core.trees import Params
from tests.algorithms.test_cfl import two_groups
from tests.algorithms.test_fedamp import vector
from tests.helpers import ENGINES, F64, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_by_hand(engine: str) -> None:
    """All download all; the second round lacks a client, the third has one whose model is two rounds old."""
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedFomo(epochs=3), data, model, engine, FULL_BATCH)
    server = fed.engine.experiment.algorithm.server_init(model)
    theta, trained = [model.params] * 4, [model.params] * 4
    uploaded: dict[int, Params] = {}
    p = torch.zeros(4, 4, dtype=F64)

    def weight(i: int, other: Params) -> float:
        x, y = data.val.of(i) if len(data.val.of(i)[0]) else data.train.of(i)  # bo has nothing to validate on
        before, after = (float(torch.nn.functional.cross_entropy(model(w, x), y)) for w in (theta[i], other))
        return (before - after) / float((vector(other) - vector(theta[i])).norm())

    for round, cohort in enumerate([(0, 1, 2, 3), (2, 0, 1), (3, 1, 0)]):
        server = fed.run_round(round, cohort, server)
        new = {}
        for i in cohort:
            seen = {j: w for j, w in uploaded.items() if j != i}
            if (round, i) == (2, 3):  # was away, and has three to choose from; but all get as many
                seen = {j: w for j, w in seen.items() if float(server["p"]["di"][j]) != 0}
                assert len(seen) == 2
            weights = {j: weight(i, w) for j, w in seen.items()}
            for j, value in weights.items():
                p[i, j] += value
            if round:
                weights[i], seen[i] = weight(i, trained[i]), trained[i]
            total = sum(max(v, 0) for v in weights.values())
            start = {
                k: v + sum(max(a, 0) / total * (seen[j][k] - v) for j, a in weights.items()) if total else v
                for k, v in theta[i].items()
            }
            new[i] = (start, descend(model, start, *data.train.of(i), steps=3))
        for i, (start, after) in new.items():
            theta[i], trained[i] = start, after
        uploaded = {i: trained[i] for i in cohort}
    assert_equal(models(fed, server), dict(zip(data.clients, trained, strict=True)))
    assert_equal(server["p"], {c: p[i] for i, c in enumerate(data.clients)})
    assert_equal(server["models"], {data.clients[i]: w for i, w in uploaded.items()})
    assert fed.record.gathered == {"model of each client", "weights of models"}


def test_where_training_helps_and_nobody_else_is_there_it_is_local() -> None:
    data = make_data(sizes={"ada": (9, 0, 2), "cy": (6, 0, 2)})  # validation is on training data
    ours, alone = (federate(a, data, make_model("mlp", data), solver=FULL_BATCH) for a in (FedFomo(models=0), Local()))
    assert_equal(models(ours, run(ours, 5)), models(alone, run(alone, 5)))
    assert ours.record.gathered == {"model of each client"}


def test_those_that_are_alike_find_each_other() -> None:
    data, model = two_groups()
    fed = federate(FedFomo(epochs=2, models=2), data, model, "vmap")
    server = run(fed, 12)
    p = torch.stack([server["p"][c] for c in data.clients])
    alike = (torch.arange(6)[:, None] - torch.arange(6)) % 2 == 0
    others = ~torch.eye(6, dtype=torch.bool)
    assert float(p[alike & others].mean()) > 0 > float(p[~alike].mean()), p


def test_downloads_are_by_affinity_or_of_anyone() -> None:
    names = tuple("abcdefgh")
    p = torch.tensor([0.0, 0.1, 0.9, 0.3, 0.2, 0.8, -0.4, -0.5])

    def chosen(epsilon: float, round: int = 1) -> list[str]:
        fed: Any = SimpleNamespace(seed=3, round=round, names=names)
        return FedFomo(models=3, epsilon=epsilon).choose(fed, "a", list(names), p)

    assert chosen(0.0) == ["c", "f", "d"]
    assert chosen(0.3, round=7) == ["c", "f", "d"]  # it has fallen to 0
    several = {tuple(chosen(1.0 + 0.05 * round, round)) for round in range(20)}
    assert len(several) > 10
    assert all(len(set(one)) == 3 and "a" not in one for one in several)
