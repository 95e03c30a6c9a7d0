"""JointLS and EmpiricalBayes against numpy, and Learn2pFed-Net by hand and at its limits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.algorithms.empirical_bayes import EmpiricalBayes
from fedtailor.algorithms.joint_ls import JointLS
from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.samples import FederatedData, Rows
from fedtailor.data import load
from fedtailor.data.configs import PolynomialConfig
from fedtailor.models import build
from tests.helpers import F64, evaluate, federate, make_data, models, run


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


@pytest.mark.parametrize("samples", [3, 5, 6])
@pytest.mark.parametrize("kind", [EmpiricalBayes, Learn2pFed])
def test_sites_with_no_more_samples_than_parameters_learn_together(kind: type[Algorithm], samples: int) -> None:
    """Alone each fits its samples exactly, which says nothing of the noise; what is common can still be found."""
    data = make_data("regression", sizes={f"c{i:02d}": (samples, 2, 20) for i in range(20)}, shape=(5,), outputs=1)
    draw = torch.Generator().manual_seed(0)

    def with_targets(rows: Rows) -> Rows:
        noise = 0.1 * torch.randn(len(rows.x), 1, generator=draw, dtype=F64)
        return replace(rows, y=rows.x @ torch.linspace(-1, 1, 5, dtype=F64)[:, None] + 1 + noise)

    data = replace(data, train=with_targets(data.train), val=with_targets(data.val), test=with_targets(data.test))
    model = build("linear", data.shape, 1, seed=1, dtype=F64)
    fed = federate(kind(), data, model)
    _, metrics = evaluate(fed, run(fed, rounds=3))
    assert np.mean([float(m["test/rmse"]) for m in metrics.values()]) < 0.15
