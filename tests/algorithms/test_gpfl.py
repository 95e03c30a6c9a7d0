"""GPFL by hand: features under two conditions, embeddings, and the private head."""

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.gpfl import BEFORE, BETA, GAMMA, GPFL, E
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    F64,
    FULL_BATCH,
    assert_equal,
    evaluate,
    federate,
    make_data,
    make_model,
    run,
    states,
    weighted,
)


def conditioned(t: Params, f: Tensor, by: Tensor) -> Tensor:
    """With modules of torch, as the authors have it."""
    parts = []
    for name in (GAMMA, BETA):
        linear = nn.functional.linear(by, t[f"{name}.weight"], t[f"{name}.bias"])
        parts.append(nn.functional.layer_norm(linear.relu(), [5], t[f"{name}.scale"], t[f"{name}.shift"]))
    return torch.relu(f * (parts[0] + 1) + parts[1])


def features(w: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ w["hidden.0.weight"].T + w["hidden.0.bias"])


def conditions(emb: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    p = sum(emb[label] for label in y.tolist()) / len(y)
    assert isinstance(p, Tensor)
    return emb.mean(0), p


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = GPFL(epochs=2, lam=0.3, mu=0.05)
    common, heads = algorithm.server_init(model), [model.head] * 4
    for _ in range(2):
        trained = []
        for i in range(4):
            x, y = data.train.of(i)
            received = common[E]
            g, p = conditions(received, y)
            t = common | heads[i]
            for _ in range(2):
                leaf = {k: v.detach().clone().requires_grad_() for k, v in t.items()}
                f = features(leaf, x)
                output = conditioned(leaf, f, p) @ leaf["out.weight"].T + leaf["out.bias"]
                of_all = conditioned(leaf, f, g)
                cosines = nn.functional.normalize(of_all) @ nn.functional.normalize(leaf[E]).T
                loss = nn.functional.cross_entropy(output, y) + nn.functional.cross_entropy(cosines, y)
                loss = loss + 0.3 * (of_all - received[y]).norm(dim=1).mean()
                decay = [v for k, v in leaf.items() if k.startswith("gpfl.")]
                loss = loss + 0.025 * sum(v.square().sum() for v in decay)
                loss.backward()
                t = {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}
            heads[i] = {k: t[k] for k in model.head}
            trained.append({k: t[k] for k in common})
        common = weighted(trained, [9, 1, 6, 13])
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, common)
    for i, mine in enumerate(states(fed).values()):
        assert_equal(mine["state"], heads[i])
    _, metrics = evaluate(fed, server)
    for i, name in enumerate(data.clients):
        x, y = data.test.of(i)
        if not len(y):
            continue
        p = conditions(common[E], data.train.of(i)[1])[1]
        output = conditioned(common, features(common, x), p) @ heads[i]["out.weight"].T + heads[i]["out.bias"]
        assert float(metrics[name]["test/loss"]) == pytest.approx(float(nn.functional.cross_entropy(output, y)))
    assert BEFORE not in server
    assert server[E].dtype == F64


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="not regression"):
        GPFL().check(make_model("mlp", make_data("regression")), "regression")
