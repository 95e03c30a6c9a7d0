"""FedEM by hand: expectation, maximization and the weighted steps of every component."""

import pytest
import torch
from torch import nn

from fedtailor.algorithms.fedem import FedEM
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import F64, FULL_BATCH, assert_equal, federate, make_data, make_model, models, run, states, weighted

COUNTS = [9, 1, 6, 13]


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = FedEM(epochs=2, components=2)
    first = algorithm.server_init(model)
    theta = [{k: first[f"{m}.{k}"] for k in model.params} for m in range(2)]
    pi = [[0.5, 0.5] for _ in COUNTS]
    for _ in range(2):
        trained: list[list[Params]] = [[], []]
        for i in range(4):
            x, y = data.train.of(i)
            losses = [nn.functional.cross_entropy(model(w, x), y, reduction="none") for w in theta]
            q = [[pi[i][m] * float(torch.exp(-losses[m][s])) for m in range(2)] for s in range(len(y))]
            q = [[a / sum(row) for a in row] for row in q]
            pi[i] = [sum(row[m] for row in q) / len(y) for m in range(2)]
            for m in range(2):
                w = theta[m]
                for _ in range(2):
                    leaf = {k: v.detach().clone().requires_grad_() for k, v in w.items()}
                    each = nn.functional.cross_entropy(model(leaf, x), y, reduction="none")
                    (each * torch.tensor([row[m] for row in q], dtype=F64)).mean().backward()
                    w = {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}
                trained[m].append(w)
        theta = [weighted(each, COUNTS) for each in trained]
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, {f"{m}.{k}": v for m in range(2) for k, v in theta[m].items()})
    for i, (name, mine) in enumerate(states(fed).items()):
        assert mine["state"].tolist() == pytest.approx(pi[i])
        x, _ = data.test.of(i)
        mixed = sum(pi[i][m] * model(theta[m], x).softmax(1) for m in range(2))
        assert_equal(algorithm.predict(model, models(fed, server)[name], x).exp(), mixed)
    assert max(abs(a - 0.5) for a, _ in pi) > 0.01  # the components are told apart


def test_numbers_are_mixed_as_they_are() -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    algorithm = FedEM(components=2)
    fed = federate(algorithm, data, model)
    server = run(fed, rounds=1)
    x, _ = data.test.of(0)
    a, _ = states(fed)["ada"]["state"].tolist()
    theta = [{k: server[f"{m}.{k}"] for k in model.params} for m in range(2)]
    wanted = a * model(theta[0], x) + (1 - a) * model(theta[1], x)
    assert_equal(algorithm.predict(model, models(fed, server)["ada"], x), wanted)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="components"):
        FedEM(components=0).check(make_model("mlp", make_data()), "classification")
    with pytest.raises(ConfigError, match="BatchNorm"):
        FedEM().check(make_model("normed", make_data()), "classification")
    with pytest.raises(ConfigError, match="multilabel"):
        FedEM().check(make_model("mlp", make_data()), "multilabel")
