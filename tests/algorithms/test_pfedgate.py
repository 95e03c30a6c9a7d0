"""pFedGate by hand, block by block; with open gates it is FedAvg."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedtailor.algorithms.pfedgate import PFedGate, block_sizes
from fedtailor.core.client import onboard
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.helpers import (
    F64,
    FULL_BATCH,
    assert_equal,
    federate,
    make_data,
    make_model,
    models,
    run,
    weighted,
)

COUNTS = [9, 1, 6, 13]
Gate = tuple[Tensor, Tensor]


def spans(model: Model, blocks: int) -> list[tuple[str, int, int]]:
    """Name, first and last entry of every block."""
    out = []
    for k, v in model.trainable.items():
        size = -(-v.numel() // blocks)
        out += [(k, at, min(at + size, v.numel())) for at in range(0, v.numel(), size)]
    return out


def gated(model: Model, theta: Params, gate: Gate, x: Tensor, density: float, blocks: int) -> Params:
    """With dropped blocks at 0, whose gates are learned as if they were kept."""
    table = spans(model, blocks)
    g = torch.sigmoid(x @ gate[0].T + gate[1]).mean(0)
    size = {k: -(-v.numel() // blocks) for k, v in model.trainable.items()}
    room = density * sum(size[k] for k, _, _ in table)
    keep = [i for i, (_, at, _) in enumerate(table) if at == 0]
    used = sum(size[table[i][0]] for i in keep)
    for i in sorted(set(range(len(table))) - set(keep), key=lambda i: (-g[i].item() / size[table[i][0]], i)):
        used += size[table[i][0]]
        if used > room:
            break
        keep.append(i)
    parts: dict[str, list[Tensor]] = {k: [] for k in theta}
    for i, (k, at, to) in enumerate(table):
        factor = g[i] if i in keep else g[i] - g[i].detach()
        parts[k].append(factor * theta[k].reshape(-1)[at:to])
    return {k: torch.cat(parts[k]).reshape(v.shape) for k, v in theta.items()}


def step(model: Model, theta: Params, gate: Gate, x: Tensor, y: Tensor, density: float) -> tuple[Params, Gate]:
    leaf = {k: v.clone().requires_grad_() for k, v in theta.items()}
    a, b = (v.clone().requires_grad_() for v in gate)
    cross_entropy(model(gated(model, leaf, (a, b), x, density, 3), x), y).backward()
    assert a.grad is not None
    assert b.grad is not None
    made = {k: (v - 0.1 * v.grad).detach() for k, v in leaf.items() if v.grad is not None}
    return made, (gate[0] - 0.1 * a.grad, gate[1] - 0.1 * b.grad)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("density", [0.6, 1.0])
def test_rounds_by_hand(engine: str, density: float) -> None:
    data = make_data()
    model = make_model("mlp", data)
    count, theta = len(spans(model, 3)), model.params
    first = torch.zeros(count, 4, dtype=F64), torch.full((count,), 0.5, dtype=F64)
    gate: list[Gate] = [first] * 4
    for _ in range(3):
        trained = []
        for i in range(4):
            own = theta
            for _ in range(2):
                own, gate[i] = step(model, own, gate[i], *data.train.of(i), density)
            trained.append(own)
        theta = weighted(trained, COUNTS)
    fed = federate(PFedGate(epochs=2, density=density, blocks=3, start=0.5), data, model, engine, FULL_BATCH)
    server = run(fed, rounds=3)
    assert_equal(server, theta)
    wanted = {c: gated(model, theta, gate[i], data.train.of(i)[0], density, 3) for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted)


def test_no_more_is_used_than_may_be() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(PFedGate(density=0.7, blocks=4), data, model)
    whole = sum(count * size for count, size in block_sizes(model, 4).values())
    used = [sum(int((v != 0).sum()) for v in mine.values()) for mine in models(fed, run(fed)).values()]
    assert max(used) <= 0.7 * whole
    assert min(used) > 0.4 * whole


def test_a_newcomer_trains_its_gates_only() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(PFedGate(density=1.0, blocks=3), data, model, solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    count = len(spans(model, 3))
    gate = torch.zeros(count, 4, dtype=F64), torch.full((count,), 2.0, dtype=F64)
    x, y = data.train.of(3)
    for _ in range(4):
        _, gate = step(model, server, gate, x, y, 1.0)
    assert_equal(onboard(fed.engine.experiment, 3, server, 4), gated(model, server, gate, x, 1.0, 3))


def test_mistakes() -> None:
    model = make_model("mlp", make_data())
    for wrong in (PFedGate(density=0.0), PFedGate(density=1.1), PFedGate(blocks=0), PFedGate(samples=0)):
        with pytest.raises(ConfigError, match="pFedGate needs density above 0"):
            wrong.check(model, "classification")
