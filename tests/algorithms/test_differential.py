"""DUW, FeDEQ and FedSelect a second time, in numpy from the papers, with gradients worked out by hand."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedtailor.algorithms import make
from fedtailor.core.environment import Environment
from fedtailor.core.trees import Params
from fedtailor.models import build
from tests.helpers import F64, FULL_BATCH, federate, make_data, make_model, models, run

Array = NDArray[np.float64]
Net = dict[str, Array]
LR, COUNTS, CLIENTS = 0.1, (9, 1, 6, 13), range(4)


def arrays(params: Params) -> Net:
    return {k: v.detach().numpy().copy() for k, v in params.items()}


def assert_same(found: Params, wanted: Net) -> None:
    assert found.keys() == wanted.keys()
    for k, v in wanted.items():
        np.testing.assert_allclose(found[k].numpy(), v, rtol=0, atol=1e-6, err_msg=k)


def slopes_of_logits(logits: Array, y: Array) -> tuple[float, Array]:
    """Mean cross-entropy and its derivative."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(p[rows, y]).mean()
    p[rows, y] -= 1
    return float(loss), p / len(y)


def mlp(net: Net, x: Array, y: Array) -> tuple[float, Net]:
    """Loss and gradient of one hidden layer with ReLU."""
    a = x @ net["hidden.0.weight"].T + net["hidden.0.bias"]
    h = np.maximum(a, 0)
    loss, d = slopes_of_logits(h @ net["out.weight"].T + net["out.bias"], y)
    e = (d @ net["out.weight"]) * (a > 0)
    return loss, {
        "hidden.0.weight": e.T @ x,
        "hidden.0.bias": e.sum(0),
        "out.weight": d.T @ h,
        "out.bias": d.sum(0),
    }


def samples() -> tuple[Any, list[tuple[Array, Array]]]:
    data = make_data()
    return data, [tuple(v.numpy() for v in data.train.of(i)) for i in CLIENTS]  # type: ignore[misc]


@pytest.mark.parametrize("passes", [(2, 2, 2, 2), (2, 6, 4, 2)])
@pytest.mark.parametrize("name", ["duw-fedavg", "duw-fednova"])
def test_duw_an_outer_iteration_and_a_round(name: str, passes: tuple[int, ...]) -> None:
    """Algorithms 3 to 5, the first-order gradient in closed form: two rounds, then Adam, then a round.

    Some replies do not arrive: such a client counts with the model that it was sent, and its loss as any other's.
    """
    data, each = samples()
    model = make_model("mlp", data)
    algorithm = make(name, {"epochs": 2, "horizon": 2, "outer_iterations": 1, "outer_lr": 0.05})
    answers = (1.0, 0.0, 1.0, 0.5)
    environment = Environment(seed=3, epochs=tuple(p // 2 for p in passes), answer=answers, missing="stale")
    fed = federate(algorithm, data, model, solver=FULL_BATCH, environment=environment)
    server = algorithm.server_init(model)
    for round in (0, 1):
        server = fed.run_round(round, CLIENTS, server)
    assert fed.attendance.missed == [tuple(sorted(set(CLIENTS) - set(environment.answers(1, 0, CLIENTS, COUNTS))))]

    def local(w: Net, here: tuple[int, ...]) -> tuple[list[Net], Net]:
        """Every client's model after its steps, and the sum of all gradients on the way."""
        total, trained = {k: np.zeros_like(v) for k, v in w.items()}, []
        tau_eff = sum(COUNTS[i] * passes[i] for i in here) / sum(COUNTS)
        for i, (x, y) in enumerate(each):
            u, rate = dict(w), LR * tau_eff / passes[i] if name == "duw-fednova" else LR
            for _ in range(passes[i]):
                slope = mlp(u, x, y)[1]
                total = {k: total[k] + slope[k] for k in w}
                u = {k: u[k] - (rate if i in here else 0) * slope[k] for k in w}
            trained.append(u)
        return trained, total

    def averaged(trained: list[Net], theta: Array) -> Net:
        share = theta**2 / (theta**2).sum()
        return {k: sum(s * u[k] for s, u in zip(share, trained, strict=True)) for k in trained[0]}

    first = arrays(model.params)
    theta = np.sqrt(np.array(COUNTS) / sum(COUNTS)) * np.ones((2, 1))
    w, path = first, []
    for t in range(2):
        trained, total = local(w, environment.answers(0, t, CLIENTS, COUNTS))
        w = averaged(trained, theta[t])
        path.append((trained, w, total))
    end = [mlp(w, x, y)[1] for x, y in each]
    later = {k: sum(n * slope[k] for n, slope in zip(passes, end, strict=True)) for k in w}  # as many passes at the end
    gradient = np.zeros((2, 4))
    for t in (1, 0):
        trained, after, total = path[t]
        for j in CLIENTS:
            inner = sum(float((later[k] * (trained[j][k] - after[k])).sum()) for k in w)
            gradient[t, j] = 2 * theta[t, j] / (theta[t] ** 2).sum() * inner
        later = {k: later[k] + total[k] for k in w}
    np.testing.assert_allclose(server["learned"]["first"].numpy(), 0.1 * gradient, rtol=0, atol=1e-9)
    theta = theta - 0.05 * gradient / (np.abs(gradient) + 1e-8)  # the first step of Adam
    np.testing.assert_allclose(server["learned"]["x"].numpy(), theta, rtol=0, atol=1e-6)
    assert np.abs(gradient).min() > 1e-5
    assert_same(server["w"], averaged(local(first, environment.answers(1, 0, CLIENTS, COUNTS))[0], theta[0]))


def softplus(a: Array) -> Array:
    return np.logaddexp(0, a)


def sigmoid(a: Array) -> Array:
    return 1 / (1 + np.exp(-a))


def deq(net: Net, x: Array, y: Array) -> tuple[float, Net]:
    """Loss and implicit gradient of z = softplus(B z + C x + b), a dense layer with softplus, and a last one."""
    b = net["equilibrium.cell.weight"]
    injected = x @ net["inject.weight"].T + net["inject.bias"]
    z = np.zeros_like(injected)
    for _ in range(400):  # a contraction: the plain iteration gets there
        z = softplus(z @ b.T + injected)
    slope = sigmoid(z @ b.T + injected)
    a = z @ net["hidden.weight"].T + net["hidden.bias"]
    loss, d = slopes_of_logits(softplus(a) @ net["out.weight"].T + net["out.bias"], y)
    e = (d @ net["out.weight"]) * sigmoid(a)
    by_z = e @ net["hidden.weight"]
    # (1 - J')^-1 with J = diag(slope) B, sample by sample
    eye = np.eye(len(b))
    q = np.stack([np.linalg.solve(eye - (s[:, None] * b).T, g) * s for s, g in zip(slope, by_z, strict=True)])
    return loss, {
        "inject.weight": q.T @ x,
        "inject.bias": q.sum(0),
        "equilibrium.cell.weight": q.T @ z,
        "hidden.weight": e.T @ z,
        "hidden.bias": e.sum(0),
        "out.weight": d.T @ softplus(a),
        "out.bias": d.sum(0),
    }


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_fedeq_two_rounds_with_equilibria(engine: str) -> None:
    """Algorithm 1 with the paper's unscaled dual: head, then representation with <lambda, .> and rho, then lambda."""
    data, each = samples()
    solve = {"tolerance": 1e-12, "max_iterations": 200, "gradient": "implicit", "warm_start": False}
    options = {"width": 4, "hidden": 3, "project": False} | solve
    model = build("deq-mlp", data.shape, data.outputs, seed=1, options=options, dtype=F64)
    rho = 0.3
    fed = federate(make("fedeq", {"rho": rho, "epochs": 2, "head_epochs": 3}), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)

    theta, heads = arrays(model.body), [arrays(model.head) for _ in CLIENTS]
    duals = [{k: np.zeros_like(v) for k, v in theta.items()} for _ in CLIENTS]
    for _ in range(2):
        sent = []
        for i, (x, y) in enumerate(each):
            for _ in range(3):
                slope = deq(theta | heads[i], x, y)[1]
                heads[i] = {k: v - LR * slope[k] for k, v in heads[i].items()}
            own = dict(theta)
            for _ in range(2):
                slope = deq(own | heads[i], x, y)[1]
                own = {k: v - LR * (slope[k] + duals[i][k] + rho * (v - theta[k])) for k, v in own.items()}
            duals[i] = {k: v + rho * (own[k] - theta[k]) for k, v in duals[i].items()}
            sent.append(own)
        pairs = list(zip(COUNTS, sent, strict=True))
        theta = {k: np.sum([n * own[k] for n, own in pairs], axis=0) / sum(COUNTS) for k in theta}
    assert_same(server, theta)
    served = models(fed, server)
    for name, head in zip(data.clients, heads, strict=True):
        assert_same({k: served[name][k] for k in head}, head)


def test_fedselect_three_rounds() -> None:
    """Algorithms 1 to 3 on one long vector: masks grow by the largest changes, positions are averaged over sharers."""
    data, each = samples()
    model = make_model("mlp", data)
    rate, alpha, epochs = 0.25, 0.3, 2
    algorithm = make("fedselect", {"rate": rate, "alpha": alpha, "epochs": epochs, "mean": "clients"})
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    server = run(fed, rounds=3)

    net = arrays(model.params)
    names = sorted(net)
    cuts = np.cumsum([net[k].size for k in names])[:-1]

    def as_net(v: Array) -> Net:
        return {k: part.reshape(net[k].shape) for k, part in zip(names, np.split(v, cuts), strict=True)}

    def slope(v: Array, i: int) -> Array:
        found = mlp(as_net(v), *each[i])[1]
        return np.concatenate([found[k].ravel() for k in names])

    w = np.concatenate([net[k].ravel() for k in names])
    d = len(w)
    theta = [w.copy() for _ in CLIENTS]
    mask = [np.zeros(d, bool) for _ in CLIENTS]
    for last in (False, False, True):
        wider = []
        for i in CLIENTS:
            before = theta[i].copy()
            for _ in range(epochs):
                theta[i] = theta[i] - LR * slope(theta[i], i) * mask[i]
                theta[i] = theta[i] - LR * slope(theta[i], i) * ~mask[i]
            change = np.where(mask[i], -1, np.abs(theta[i] - before))
            count = min(round(rate * (~mask[i]).sum()), round(alpha * d) - mask[i].sum())
            more = mask[i].copy()
            more[np.argsort(-change)[: max(0, count)]] = True
            wider.append(more)
        sharers = np.stack([~m for m in mask])
        w = np.where(sharers.any(0), (sharers * theta).sum(0) / np.maximum(sharers.sum(0), 1), w)
        theta = [np.where(m, own, w) for m, own in zip(mask, theta, strict=True)]
        mask = mask if last else wider
    assert any(m.any() for m in mask)
    assert_same(server["w"], as_net(w))
    served = models(fed, server)
    for name, own in zip(data.clients, theta, strict=True):
        assert_same(served[name], as_net(own))
