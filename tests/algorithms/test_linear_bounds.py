"""JointLS and EmpiricalBayes against numpy, and Learn2pFed-Net by hand and at its limits."""

from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.algorithms.empirical_bayes import EmpiricalBayes
from fedtailor.algorithms.joint_ls import JointLS
from fedtailor.algorithms.learn2pfed_net import Learn2pFedNet
from fedtailor.data import load
from fedtailor.data.configs import PolynomialConfig
from fedtailor.data.federated import FederatedData
from fedtailor.models import build
from tests.helpers import F64, FULL_BATCH, assert_equal, federate, make_data, make_model, models, run


def polynomial(setting: Any) -> FederatedData:
    return load(PolynomialConfig(setting=setting, clients=4, samples=120), seed=3).to(F64)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("own", [(), (3,), (1, 3), (0, 1, 2, 3), None])
def test_joint_least_squares_is_the_big_system(own: tuple[int, ...] | None, engine: str) -> None:
    data = polynomial(2)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    fed = federate(JointLS(personal_features=own), data, model, engine)
    found = models(fed, run(fed, rounds=1))
    personal = list(range(4)) if own is None else list(own)
    common = [i for i in range(4) if i not in personal]
    blocks = []
    for i in range(4):
        x = data.train.of(i)[0].numpy()
        mine = [x[:, personal] if j == i else np.zeros((len(x), len(personal))) for j in range(4)]
        blocks.append(np.hstack([x[:, common], *mine]))
    solution = np.linalg.lstsq(np.vstack(blocks), data.train.y[:, 0].numpy(), rcond=None)[0]
    for i, client in enumerate(data.clients):
        wanted = np.zeros(4)
        wanted[common] = solution[: len(common)]
        wanted[personal] = solution[len(common) :].reshape(4, -1)[i]
        torch.testing.assert_close(found[client]["out.weight"][0], torch.from_numpy(wanted), rtol=0, atol=1e-6)


def test_a_step_of_empirical_bayes_by_hand() -> None:
    data = polynomial(1)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    fed = federate(EmpiricalBayes(cells=2), data, model)
    server = run(fed, rounds=1)
    x = [data.train.of(i)[0].numpy() for i in range(4)]
    y = [data.train.of(i)[1][:, 0].numpy() for i in range(4)]
    alone = np.array([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y, strict=True)])
    noise = sum(((a @ v - b) ** 2).sum() for a, b, v in zip(x, y, alone, strict=True)) / sum(len(b) - 4 for b in y)
    w, t = alone.mean(0), alone.var(0)
    posterior = [np.linalg.inv(a.T @ a / noise + np.diag(1 / t)) for a in x]
    v = np.array([c @ (a.T @ b / noise + w / t) for a, b, c in zip(x, y, posterior, strict=True)])
    freedom = np.mean([1 - np.diag(c) / t for c in posterior], axis=0)
    torch.testing.assert_close(server["w"][:, 0], torch.from_numpy(v.mean(0)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(server["t"][:, 0], torch.from_numpy(v.var(0) / freedom), rtol=1e-5, atol=1e-8)


def test_a_round_of_the_network_by_hand() -> None:
    """Full batch, one epoch: v - lr (F' + rho (v - (w + z + a))) from v = w, z = a = 0."""
    data = make_data(names=("ada", "di"))
    model = make_model("mlp", data)
    algorithm = Learn2pFedNet(epochs=1, outer_lr=0.0, share=0.75)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    server = run(fed, rounds=1)
    v, total = [], 0.0
    for i in range(2):
        x, y = data.train.of(i)
        leaves = {k: p.clone().requires_grad_() for k, p in model.params.items()}
        loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model.module, leaves, (x,)), y)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        v.append({k: (p - 0.1 * g).detach() for (k, p), g in zip(leaves.items(), gradients, strict=True)})
        total += len(x)
    weights = [len(data.train.of(i)[0]) / total for i in range(2)]
    z = [{k: 0.25 * (v[i][k] - w) for k, w in model.params.items()} for i in range(2)]
    wanted = {k: sum(weights[i] * (v[i][k] - z[i][k]) for i in range(2)) for k in model.params}
    assert_equal(server["w"], wanted)
    personal = {c: {k: wanted[k] + z[i][k] for k in wanted} for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), personal)


def test_only_the_head_is_sent_by_the_papers_network() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(Learn2pFedNet(scope="head"), data, model)
    server = run(fed, rounds=2)
    assert set(server["w"]) == set(model.head)
    bodies = [tuple(m["hidden.0.weight"].flatten().tolist()) for m in models(fed, server).values()]
    assert len(set(bodies)) == 4  # each its own
