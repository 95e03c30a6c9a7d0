"""FedCP by hand; with a policy that gives all to the own head, and without pull, it is FedPer."""

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms.fedcp import FedCP
from fedtailor.algorithms.fedper import FedPer
from fedtailor.core.client import onboard
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError
from tests.helpers import (
    ENGINES,
    FULL_BATCH,
    assert_equal,
    evaluate,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)

BODY, HEAD = ("hidden.0.weight", "hidden.0.bias"), ("out.weight", "out.bias")


def features(body: Params, x: Tensor) -> Tensor:
    return torch.relu(x @ body["hidden.0.weight"].T + body["hidden.0.bias"])


def outputs(body: Params, own: Params, common: Params, policy: Params, v: Tensor, x: Tensor) -> Tensor:
    """As the paper has it: two logits for every feature, their softmax, two heads."""
    h = features(body, x)
    a = (h * v) @ policy["weight"].T + policy["bias"]
    a = (a - a.mean(1, keepdim=True)) / (a.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    a = torch.relu(a * policy["scale"] + policy["shift"]).reshape(len(x), 2, -1)
    r, s = a.exp()[:, 0] / a.exp().sum(1), a.exp()[:, 1] / a.exp().sum(1)
    heads = [(part * h, head) for part, head in ((r, own), (s, common))]
    return torch.stack([z @ head["out.weight"].T + head["out.bias"] for z, head in heads]).sum(0)


def direction(head: Params) -> Tensor:
    v = head["out.weight"].sum(0)
    return v / v.norm()


def mmd(a: Tensor, b: Tensor) -> Tensor:
    def mean(x: Tensor, y: Tensor) -> Tensor:
        pairs = [(u - w).square().sum() for u in x for w in y]
        return torch.stack([(-d / (2 * width)).exp() for d in pairs for width in (10, 15, 20, 50)]).sum() / len(pairs)

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


def step(parts: Tree, common: Params, received: Params, v: Tensor, x: Tensor, y: Tensor, lam: float) -> Tree:
    """One step of body, own head and policy together."""
    leaf: dict[str, Params] = tree_map(lambda u: u.clone().requires_grad_(), parts)
    loss = nn.functional.cross_entropy(outputs(leaf["body"], leaf["own"], common, leaf["policy"], v, x), y)
    (loss + lam * mmd(features(leaf["body"], x), features(received, x))).backward()
    return tree_map(lambda u: (u - 0.1 * u.grad).detach(), leaf)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = FedCP(epochs=2, lam=3.0)
    common, heads = algorithm.server_init(model), [model.head] * 4
    for _ in range(2):
        sent: dict[str, list[Params]] = {"body": [], "head": [], "policy": []}
        for i in range(4):
            x, y = data.train.of(i)
            v = direction(heads[i])
            parts = {"body": common["body"], "own": heads[i], "policy": common["policy"]}
            for _ in range(2):
                parts = step(parts, common["head"], common["body"], v, x, y, 3.0)
            heads[i] = parts["own"]
            sent["body"].append(parts["body"])
            sent["policy"].append(parts["policy"])
            sent["head"].append({k: 0.5 * heads[i][k] + 0.5 * common["head"][k] for k in HEAD})
        common = {part: weighted(each, [9, 1, 6, 13]) for part, each in sent.items()}
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, common)
    metrics = evaluate(fed, server)[1]
    for i, (name, mine) in enumerate(states(fed).items()):
        assert_equal(mine["state"], heads[i])
        x, y = data.train.of(i)
        found = outputs(common["body"], heads[i], common["head"], common["policy"], direction(heads[i]), x)
        assert_equal(metrics[name]["train/loss"], nn.functional.cross_entropy(found, y))


@pytest.mark.parametrize("engine", ENGINES)
def test_with_all_for_the_own_head_it_is_fedper(engine: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    fed, per = (federate(a, data, model, engine) for a in (FedCP(lam=0.0, epochs=2), FedPer(epochs=2)))
    server = FedCP().server_init(model)
    sure = torch.cat([torch.full((5,), 1e3, dtype=model.dtype), torch.zeros(5, dtype=model.dtype)])
    server["policy"] |= {"scale": torch.zeros_like(sure), "shift": sure}  # r is exactly 1
    common_bias = {"out.bias": torch.zeros_like(model.head["out.bias"])}  # which is added whatever r is
    body = model.body
    for number in range(3):
        server = fed.run_round(number, range(4), server | {"head": server["head"] | common_bias})
        body = per.run_round(number, range(4), body)
    assert_equal(server["body"], body)
    found, wanted = models(fed, server), models(per, body)
    assert_equal({name: {k: found[name][k] for k in wanted[name]} for name in wanted}, wanted)


def test_a_newcomer_begins_with_the_common_head_and_trains_it() -> None:
    data = make_data()
    fed = federate(FedCP(), data, make_model("mlp", data), solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    x, y = data.train.of(3)
    own, v = server["head"], direction(server["head"])
    for _ in range(4):
        parts = {"body": server["body"], "own": own, "policy": server["policy"]}
        own = step(parts, server["head"], server["body"], v, x, y, 0.0)["own"]
    found = onboard(fed.engine.experiment, 3, server, 4)
    assert_equal({k: found[k] for k in HEAD}, own)
    assert_equal({k: found[k] for k in BODY}, server["body"], 0)


def test_what_it_does_not_serve() -> None:
    with pytest.raises(ConfigError, match=r"model\.head.*FedCP"):
        FedCP().check(Model(nn.Linear(4, 3)), "classification")
