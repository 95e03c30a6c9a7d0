"""FedPAC by hand; without its two parts it is FedRep; who is unlike gives nothing to a head."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor, nn

from fedtailor.algorithms.fedpac import FedPAC, collaboration
from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    EVEN_SIZES,
    F64,
    FULL_BATCH,
    assert_equal,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)

COUNTS = [9, 1, 6, 13]


def features(params: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ params["hidden.0.weight"].T + params["hidden.0.bias"])


def descended(params: Params, names: Any, x: Tensor, y: Tensor, lr: float, lam: float, c: dict[int, Tensor]) -> Params:
    """One step of the named entries on cross-entropy and, where a class has a mean c, the mean squared way to it."""
    leaf = {k: v.clone().requires_grad_(k in names) for k, v in params.items()}
    f = features(leaf, x)
    loss = nn.functional.cross_entropy(f @ leaf["out.weight"].T + leaf["out.bias"], y)
    for row, label in zip(f, y.tolist(), strict=True):
        if label in c:
            loss = loss + lam * (row - c[label]).square().mean() / len(y)
    loss.backward()
    return {k: (v - lr * v.grad).detach() if v.grad is not None else v.detach() for k, v in leaf.items()}


def best_weights(v: list[float], h: list[np.ndarray], i: int) -> np.ndarray:
    """By the definition, entry by entry, and a general solver."""
    m = len(v)
    q = np.array(
        [[((h[i] - h[j]) * (h[i] - h[k])).sum() + (v[j] if j == k else 0) for k in range(m)] for j in range(m)]
    )
    scale = np.abs(q).max()
    best = None
    for start in (np.full(m, 1 / m), np.eye(m)[i]):
        made = minimize(
            lambda a: a @ q @ a / scale,
            start,
            jac=lambda a: 2 * q @ a / scale,
            method="SLSQP",
            bounds=[(0, 1)] * m,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(m)},
            options={"ftol": 1e-16, "maxiter": 500},
        )
        best = made if best is None or made.fun < best.fun else best
    assert best is not None
    return best.x


def by_hand(data: FederatedData, model: Model, rounds: int) -> tuple[Params, list[Params], dict[int, Tensor]]:
    body, heads, c = model.body, [model.head] * 4, dict[int, Tensor]()
    for _ in range(rounds):
        h, v, trained, bodies = [], [], [], []
        for i in range(4):
            x, y = data.train.of(i)
            f = features(body, x)
            p = [float((y == label).double().mean()) for label in range(3)]
            mean = [f[y == label].mean(0) if p[label] else torch.zeros(5, dtype=F64) for label in range(3)]
            h.append(torch.stack([p[label] * mean[label] for label in range(3)]).numpy())
            spread = sum(
                p[label] * float((f[y == label] ** 2).sum(1).mean()) - p[label] ** 2 * float((mean[label] ** 2).sum())
                for label in range(3)
                if p[label]
            )
            v.append(max(spread, 0) / len(y))
            own = body | heads[i]
            for _ in range(2):
                own = descended(own, model.head, x, y, 0.3, 0.0, {})
            for _ in range(2):
                own = descended(own, model.body, x, y, 0.1, 0.7, c)
            trained.append(own)
            bodies.append({k: own[k] for k in body})
        weights = [best_weights(v, h, i) for i in range(4)]
        heads = [{k: sum(float(a[j]) * trained[j][k] for j in range(4)) for k in model.head} for a in weights]  # type: ignore[misc]
        by_label: dict[int, list[Tensor]] = {}
        for i in range(4):
            x, y = data.train.of(i)
            for row, label in zip(features(bodies[i], x), y.tolist(), strict=True):
                by_label.setdefault(label, []).append(row)
        c = c | {label: torch.stack(rows).mean(0) for label, rows in by_label.items()}
        body = weighted(bodies, COUNTS)
    return body, heads, c


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(rounds: int, engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = FedPAC(epochs=2, head_epochs=2, head_lr=0.3, lam=0.7)
    fed = federate(algorithm, data, model, engine, solver=FULL_BATCH)
    server = run(fed, rounds)
    body, heads, c = by_hand(data, model, rounds)
    # the general solver is good to six digits; a body depends on the weights from the second round on
    assert_equal(server["body"], body, 1e-10 if rounds == 1 else 1e-6)
    assert_equal(
        server["c"]["prototypes"], torch.stack([c[label] for label in range(3)]), 1e-10 if rounds == 1 else 1e-6
    )
    wanted = {name: body | heads[i] for i, name in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted, 1e-5)


def test_there_is_no_pull_in_the_first_round() -> None:
    data = make_data()
    bodies = []
    for lam in (0.0, 5.0):
        fed = federate(FedPAC(lam=lam), data, make_model("mlp", data), solver=FULL_BATCH)
        first = run(fed, rounds=1)
        bodies.append((first["body"], fed.run_round(1, range(4), first)["body"]))
    assert_equal(bodies[0][0], bodies[1][0], 0)
    with pytest.raises(AssertionError):
        assert_equal(bodies[0][1], bodies[1][1], 1e-4)


def test_the_pull_brings_features_to_the_common_means() -> None:
    data = make_data()
    model = make_model("mlp", data)
    spread = {}
    for lam in (0.0, 5.0):
        fed = federate(FedPAC(lam=lam, epochs=5), data, model, solver=FULL_BATCH)
        server = run(fed, rounds=8)
        x, y = data.train.of(3)
        spread[lam] = float((features(server["body"], x) - server["c"]["prototypes"][y]).square().sum())
    assert spread[5.0] < 0.5 * spread[0.0]


def test_heads_come_from_those_who_are_alike() -> None:
    """Two pairs with equal class means, far apart, and variances 1 and 3: three quarters and one, and nothing else."""
    h = torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]], [[90.0, 0.0]], [[90.0, 0.0]]], dtype=F64)
    a = collaboration(h, torch.tensor([1.0, 3.0, 1.0, 3.0], dtype=F64))
    pair = torch.tensor([0.75, 0.25], dtype=F64)
    near = torch.block_diag(pair.expand(2, 2), pair.expand(2, 2))
    torch.testing.assert_close(a, near, rtol=0, atol=1e-3)
    # without any difference all are one: by the inverse of the variances
    same = collaboration(torch.zeros_like(h), torch.tensor([1.0, 3.0, 1.0, 3.0], dtype=F64))
    torch.testing.assert_close(same, torch.tensor([3.0, 1, 3, 1], dtype=F64).expand(4, 4) / 8)


def test_a_class_that_nobody_has_keeps_its_mean() -> None:
    data = make_data()
    fed = federate(FedPAC(), data, make_model("mlp", data))
    server = run(fed, rounds=1)
    labels = set(data.train.of(1)[1].tolist())  # a single sample
    after = fed.run_round(1, [1], server)
    for label in range(3):
        assert torch.equal(after["c"]["prototypes"][label], server["c"]["prototypes"][label]) == (label not in labels)
    assert after["c"]["prototypes.is_known"].tolist() == [1, 1, 1]


def test_absent_clients_keep_the_head_they_got() -> None:
    data = make_data(sizes=EVEN_SIZES)
    fed = federate(FedPAC(), data, make_model("mlp", data))
    server = run(fed, rounds=1)
    before = states(fed)
    fed.run_round(1, [0, 3], server)
    after = states(fed)
    assert_equal(after["bo"], before["bo"], 0)
    assert not torch.equal(after["ada"]["state"]["out.weight"], before["ada"]["state"]["out.weight"])


def test_what_the_server_looks_at() -> None:
    data = make_data()
    fed = federate(FedPAC(), data, make_model("mlp", data))
    run(fed, rounds=1)
    assert fed.record.gathered == {"class means of each client", "their variances", "head of each client"}
    assert fed.traffic.trips == 2


def test_mistakes() -> None:
    data = make_data("regression")
    with pytest.raises(ConfigError, match=r"FedPAC .*regression"):
        FedPAC().check(make_model("mlp", data), data.task)
    with pytest.raises(ConfigError, match=r"FedPAC .*head"):
        FedPAC().check(Model(nn.Linear(4, 3)), "classification")
