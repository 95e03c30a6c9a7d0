"""JointLS and EmpiricalBayes against numpy, and Learn2pFed-Net by hand and at its limits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.algorithms._shared.random_coefficients import shrunk_variances
from fedtailor.algorithms.empirical_bayes import EmpiricalBayes
from fedtailor.algorithms.joint_ls import JointLS
from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.algorithms.linear_alone import _nearly_best
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import FederatedData, Rows
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
    w = np.linalg.lstsq(np.concatenate(x), np.concatenate(y), rcond=None)[0]
    t = noise / np.mean([np.diag(a.T @ a) for a in x], axis=0)
    posterior = [np.linalg.inv(a.T @ a / noise + np.diag(1 / t)) for a in x]
    v = np.array([c @ (a.T @ b / noise + w / t) for a, b, c in zip(x, y, posterior, strict=True)])
    freedom = np.mean([1 - np.diag(c) / t for c in posterior], axis=0)
    left = np.mean([a.T @ (b - a @ o) for a, b, o in zip(x, y, v, strict=True)], axis=0)
    newton = v.mean(0) + np.linalg.solve(sum(a.T @ a for a in x) / 4, left)
    torch.testing.assert_close(server["w"][:, 0], torch.from_numpy(newton), rtol=1e-6, atol=1e-6)
    wanted = ((v - w) ** 2).mean(0) / freedom
    torch.testing.assert_close(server["t"][:, 0], torch.from_numpy(wanted), rtol=1e-5, atol=1e-8)


def test_the_common_model_of_empirical_bayes_is_that_of_generalised_least_squares() -> None:
    """For the variances where EM ends, those of 0 included, which EM's own step would leave where it began."""
    data = polynomial(1)
    model = build("linear", data.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    server = run(federate(EmpiricalBayes(), data, model, "vmap"), rounds=20)
    t, noise = server["t"][:, 0], server["noise"]
    assert t.min() < 1e-9 < t.max()
    left, right = torch.zeros(4, 4, dtype=F64), torch.zeros(4, 1, dtype=F64)
    for i in range(4):
        x, y = data.train.of(i)
        cover = x @ t.diag() @ x.T + noise * torch.eye(len(x), dtype=F64)
        left, right = left + x.T @ torch.linalg.solve(cover, x), right + x.T @ torch.linalg.solve(cover, y)
    torch.testing.assert_close(server["w"], torch.linalg.solve(left, right), rtol=0, atol=1e-7)


def test_variances_are_shrunk_by_what_chance_explains() -> None:
    clients = torch.tensor(20.0, dtype=F64)
    # differ by less than a standard error of 2 sqrt(2 / 20): all are the mean, shrunk towards 0
    alike = shrunk_variances(torch.tensor([0.9, 1.0, 1.1], dtype=F64), clients)
    torch.testing.assert_close(alike, torch.full((3,), 1 - 2 * 2 / 60 * 2**2, dtype=F64))
    # a mean that is not beyond Akaike's threshold: nothing differs between clients
    assert not shrunk_variances(torch.tensor([0.1, 0.0, 0.3], dtype=F64), clients).any()
    # three are common, one is personal: nothing else explains it
    q = torch.tensor([0.0, 0.5, 0.0, 4e4], dtype=F64)
    far = shrunk_variances(q, clients)
    torch.testing.assert_close(far[:3], q[:3], rtol=0, atol=1e-4)
    assert 0.6 < far[3] / q[3] <= 1
    # one coefficient has nothing to be compared with
    torch.testing.assert_close(
        shrunk_variances(torch.tensor([[3.0]], dtype=F64), clients),
        torch.tensor([[3 - 2 * 2 / 20 * 4**2 / 3]], dtype=F64),
    )


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_the_hierarchy_shares_all_where_clients_are_alike_and_keeps_what_differs(spread: float) -> None:
    """Twenty clients with eight samples each: by likelihood alone some variances are left by chance."""
    kept, off = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        own = torch.linspace(-1, 1, 5, dtype=F64) + spread * torch.randn(20, 5, generator=draw, dtype=F64)
        data = make_data("regression", sizes={f"c{i:02d}": (8, 0, 1) for i in range(20)}, shape=(5,), outputs=1)
        x = torch.randn(20, 8, 5, generator=draw, dtype=F64)
        y = (x * own[:, None]).sum(-1) + torch.randn(20, 8, generator=draw, dtype=F64)
        data = replace(data, train=replace(data.train, x=x.flatten(0, 1), y=y.flatten()[:, None]))
        model = build("linear", data.shape, 1, seed=1, options={"bias": False}, dtype=F64)
        for hierarchical in (True, False):
            algorithm = EmpiricalBayes(hierarchical=hierarchical)
            fed = federate(algorithm, data, model, "vmap")
            server = run(fed, rounds=6)
            kept[hierarchical] += int((algorithm.roots(server) > 0.01).sum())
            served = models(fed, server)
            wrong = torch.stack([served[c]["out.weight"][0] for c in data.clients]) - own
            off[hierarchical] += float(wrong.square().mean())
    if spread:
        assert kept == {True: 15, False: 15}
        assert off[True] < 1.02 * off[False]
    else:
        assert kept[True] == 0 < kept[False]
        assert off[True] < off[False]


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


@pytest.mark.parametrize(("apart", "wanted"), [(5**0.5, [0.0, 1.0]), (3.0, [2.0, 1.0])])
def test_the_strongest_penalty_within_half_a_standard_error_of_the_best(apart: float, wanted: list[float]) -> None:
    """Two rows lose 1 + apart and 1 - apart: 2 in all, with a standard error of apart times the root of 2."""
    scores = torch.tensor([[-1 - apart, apart - 1], [0.0, 0.0]], dtype=torch.float64)
    assert _nearly_best(scores, torch.ones(2, dtype=torch.float64)).tolist() == wanted
