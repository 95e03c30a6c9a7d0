"""Per-FedAvg by hand, with second derivatives of plain autograd; without the own step it is FedAvg."""

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.per_fedavg import PerFedAvg
from fedtailor.core.model import Model
from fedtailor.core.random import brief_stream, stream
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from fedtailor.training.solver import Solver
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


def slopes(w: Params, x: Tensor, y: Tensor, *, create_graph: bool = False) -> list[Tensor]:
    f = torch.tanh(x @ w["first.weight"].T + w["first.bias"])
    loss = (f @ w["out.weight"].T + w["out.bias"] - y).square().mean()
    return list(torch.autograd.grad(loss, list(w.values()), create_graph=create_graph))


def leaves(w: Params) -> Params:
    return {k: v.detach().clone().requires_grad_() for k, v in w.items()}


def outer_gradient(w: Params, x: Tensor, y: Tensor, alpha: float, order: str) -> Params:
    """(I - alpha H) g: the Hessian of f at w times the gradient after the own step, written out."""
    w = leaves(w)
    first = slopes(w, x, y, create_graph=True)
    moved = leaves({k: v - alpha * g for (k, v), g in zip(w.items(), first, strict=True)})
    g = slopes(moved, x, y)
    if order == "first":
        return dict(zip(w, g, strict=True))
    curved = torch.autograd.grad(first, list(w.values()), grad_outputs=g)
    return {k: a - alpha * b for k, a, b in zip(w, g, curved, strict=True)}


def smooth() -> Model:
    """A network whose second derivatives are not 0."""
    module = torch.nn.Sequential()
    module.add_module("first", torch.nn.Linear(4, 5))
    module.add_module("tanh", torch.nn.Tanh())
    module.add_module("out", torch.nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=F64) / 2
    return Model(module, head=["out"])


@pytest.mark.parametrize("order", ["exact", "first"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(engine: str, order: str) -> None:
    data = make_data("regression")
    model = smooth()
    w = model.params
    for _ in range(2):
        trained = []
        for i in range(4):
            own = w
            for _ in range(2):
                g = outer_gradient(own, *data.train.of(i), 0.3, order)
                own = {k: own[k] - 0.1 * g[k] for k in own}
            trained.append(own)
        w = weighted(trained, [9, 1, 6, 13])
    algorithm = PerFedAvg(epochs=2, alpha=0.3, order=order)  # type: ignore[arg-type]
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, rounds=2)
    assert_equal(server, w)
    wanted = {}
    for i, name in enumerate(data.clients):
        slope = slopes(leaves(w), *data.train.of(i))
        wanted[name] = {k: v - 0.3 * own_g for (k, v), own_g in zip(w.items(), slope, strict=True)}
    assert_equal(models(fed, server), wanted)


def test_the_orders_differ() -> None:
    data = make_data("regression")
    exact, first = (federate(PerFedAvg(alpha=0.3, order=o), data, smooth()) for o in ("exact", "first"))
    with pytest.raises(AssertionError):
        assert_equal(run(exact), run(first), 1e-4)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_every_step_draws_both_batches_anew(engine: str) -> None:
    """An epoch by hand in batches of 4: D' in the order of the epoch, D the partners of D'."""
    data = make_data("regression")
    model = smooth()
    solver = Solver(lr=0.1, batch_size=4)
    fed = federate(PerFedAvg(alpha=0.3), data, model, engine, solver)
    found = fed.run_round(1, [3], model.params)
    x, y = data.train.of(3)
    circle = torch.from_numpy(stream(3, 1, 0, "di", "uniform", 0).random(13)).argsort().tolist()
    partner = {a: circle[(i + 1) % 13] for i, a in enumerate(circle)}
    w = model.params
    for rows in torch.from_numpy(brief_stream(3, 1, 0, "di", "batches", 0).permutation(13)).split(4):
        inner = [partner[int(r)] for r in rows]
        w = leaves(w)
        first = slopes(w, x[inner], y[inner], create_graph=True)
        moved = {k: v - 0.3 * g for (k, v), g in zip(w.items(), first, strict=True)}
        outer = torch.autograd.grad(_mse(moved, x[rows], y[rows]), list(w.values()))
        w = {k: (v - 0.1 * g).detach() for (k, v), g in zip(w.items(), outer, strict=True)}
    assert_equal(found, w)


def _mse(w: Params, x: Tensor, y: Tensor) -> Tensor:
    f = torch.tanh(x @ w["first.weight"].T + w["first.bias"])
    return (f @ w["out.weight"].T + w["out.bias"] - y).square().mean()


def test_mistakes() -> None:
    model = make_model("mlp", make_data())
    for wrong in (PerFedAvg(alpha=-1.0),):
        with pytest.raises(ConfigError, match="Per-FedAvg needs alpha"):
            wrong.check(model, "classification")
