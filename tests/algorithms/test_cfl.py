"""CFL by hand; without a split it is FedAvg; groups with other labels are found, also by those who were away."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.cfl import CFL
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, schema
from fedtailor.errors import ConfigError
from tests.helpers import (
    ENGINES,
    FULL_BATCH,
    assert_equal,
    descend,
    evaluate,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)

AT_ONCE = CFL(epochs=2, eps1=1e9, eps2=0.0, first_rounds=-1, min_clients=2, max_clusters=2)
COUNTS = [9, 1, 6, 13]


def vector(after: Params, before: Params) -> Tensor:
    return torch.cat([(after[k] - before[k]).flatten() for k in sorted(after)])


def complete_linkage(updates: list[Tensor]) -> list[list[int]]:
    """Two groups: again and again the two groups are joined whose least similar members are the most similar."""

    def similarity(a: list[int], b: list[int]) -> float:
        return min(float(torch.cosine_similarity(updates[i], updates[j], dim=0)) for i in a for j in b)

    groups = [[i] for i in range(len(updates))]
    while len(groups) > 2:
        a, b = max(itertools.combinations(groups, 2), key=lambda pair: similarity(*pair))
        groups = [g for g in groups if g not in (a, b)] + [sorted(a + b)]
    return groups


def nodes(fed: Federation) -> list[int]:
    return [int(mine["state"]["node"]) for mine in states(fed).values()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_by_hand(rounds: int, engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    w = [descend(model, model.params, *data.train.of(i), steps=2) for i in range(4)]
    groups = complete_linkage([vector(v, model.params) for v in w])
    for again in range(rounds):
        if again:
            w = [descend(model, w[i], *data.train.of(i), steps=2) for i in range(4)]
        of_group = {i: weighted([w[j] for j in g], [COUNTS[j] for j in g]) for g in groups for i in g}
        w = [of_group[i] for i in range(4)]
    fed = federate(AT_ONCE, data, model, engine, FULL_BATCH)
    server = run(fed, rounds)
    found = nodes(fed)
    assert sorted(set(found)) == [1, 2]
    assert all((found[i] == found[j]) == any(i in g and j in g for g in groups) for i in range(4) for j in range(4))
    assert_equal(models(fed, server), dict(zip(data.clients, w, strict=True)))
    # where the root was split its model stays as those had it who were there
    assert_equal({k: v[0] for k, v in server["w"].items()}, model.params, tolerance=0)


@pytest.mark.parametrize(
    "algorithm",
    [CFL(), replace(AT_ONCE, max_clusters=1), replace(AT_ONCE, min_clients=5), replace(AT_ONCE, first_rounds=3),
     replace(AT_ONCE, eps1=0.0), replace(AT_ONCE, eps2=1e9)],
)  # fmt: skip
def test_without_a_split_it_is_fedavg(algorithm: CFL) -> None:
    data = make_data()
    fed = federate(algorithm, data, make_model("mlp", data), solver=FULL_BATCH)
    plain = federate(FedAvg(epochs=algorithm.epochs), data, make_model("mlp", data), solver=FULL_BATCH)
    assert_equal(models(fed, run(fed)), models(plain, run(plain)), tolerance=1e-14)
    assert nodes(fed) == [0] * 4


def two_groups() -> tuple[FederatedData, Model]:
    """Six clients with the same kind of samples; those at odd places have the labels the other way round."""

    def rows(n: int, name: str) -> Rows:
        xs = [torch.from_numpy(stream("groups", name, c).normal(size=(n, 4))) for c in range(6)]
        ys = [(x[:, :3].argmax(1) + c % 2) % 3 for c, x in enumerate(xs)]
        return Rows(torch.cat(xs), torch.cat(ys), n * torch.arange(7))

    data = FederatedData("groups", "classification", tuple("abcdef"), rows(40, "a"), rows(5, "b"), rows(50, "c"), 3)
    return data, make_model("linear", data)


def accuracies(fed: Federation, server: Tree) -> list[float]:
    return [float(m["test/accuracy"]) for m in evaluate(fed, server)[1].values()]


def test_two_groups_are_found() -> None:
    data, model = two_groups()
    fed = federate(CFL(epochs=2), data, model, "vmap")
    server = run(fed, 60)
    assert nodes(fed) in ([1, 2] * 3, [2, 1] * 3)
    assert fed.record.gathered == {"cluster of each client", "model of each client", "sample counts"}
    one = federate(FedAvg(epochs=2), data, model, "vmap")
    assert min(accuracies(fed, server)) > 0.8 > max(accuracies(one, run(one, 60)))


def test_who_was_away_finds_its_group() -> None:
    data, model = two_groups()
    fed = federate(replace(AT_ONCE, first_rounds=20), data, model, solver=FULL_BATCH)
    server = run(fed, 23, cohort=[0, 1, 2, 3])
    even, odd = nodes(fed)[:2]
    assert nodes(fed) == [even, odd, even, odd, 0, 0]
    after = fed.run_round(23, [1, 4, 5], server)
    assert nodes(fed) == [even, odd, even, odd, even, odd]
    assert schema(after) == schema(server)
    # the newcomers' training began at the model of the root: it counts for neither group
    wanted = {k: v.clone() for k, v in server["w"].items()}
    for k, v in descend(model, {k: v[odd] for k, v in wanted.items()}, *data.train.of(1), steps=2).items():
        wanted[k][odd] = v
    assert_equal(after["w"], wanted)


def test_a_lost_client_stays_where_it_is() -> None:
    data = make_data()
    data.train.of(1)[0].fill_(torch.inf)
    fed = federate(AT_ONCE, data, make_model("mlp", data))
    run(fed, 1)
    assert [f.client for f in fed.record.faults] == ["bo"]
    assert nodes(fed)[1] == 0
    assert sorted({nodes(fed)[i] for i in (0, 2, 3)}) == [1, 2]


def test_clusters_end_at_the_limit() -> None:
    data = make_data()
    fed = federate(replace(AT_ONCE, max_clusters=3), data, make_model("mlp", data))
    server = run(fed, 6)
    assert sorted(server["child"].tolist()) == [0, 0, 0, 1, 3]
    assert len(set(nodes(fed))) == 3


def test_impossible_options_are_refused() -> None:
    model = make_model("mlp", make_data())
    for wrong in (CFL(max_clusters=0), CFL(min_clients=1)):
        with pytest.raises(ConfigError, match="max_clusters of at least 1"):
            wrong.check(model, "classification")
