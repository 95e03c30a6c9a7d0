"""FedL2P by hand in one graph; statistics and their mixture; without a meta-network's steps it is FedAvg+FT."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedtailor.algorithms._shared.layers import input_statistics, with_derivable_statistics
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedl2p import FedL2P
from fedtailor.core.trees import Params
from tests.helpers import (
    ENGINES,
    EVEN_SIZES,
    F64,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_me,
    make_model,
    models,
    run,
    weighted,
)

LAYERS = {"hidden.0.weight": 0, "hidden.0.bias": 0, "out.weight": 1, "out.bias": 1}


def statistics(w: Params, x: Tensor) -> Tensor:
    """Mean and deviation of what enters the two layers of the small network."""
    inner = torch.relu(x @ w["hidden.0.weight"].T + w["hidden.0.bias"])
    return torch.stack([v for part in (x, inner) for v in (part.mean(), part.std(correction=0))])


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = FedL2P(epochs=2, tune_epochs=2, meta_lr=0.3, hidden=3)
    net = {k: v.clone().requires_grad_() for k, v in algorithm.network(model).items()}
    optimizer = torch.optim.Adam([net[k] for k in sorted(net)], lr=0.3)

    def tuned(w: Params, i: int) -> Params:
        x, y = data.train.of(i)
        units = torch.relu(net["first"] @ statistics(w, x) + net["first_bias"])
        eta = (net["out"] @ torch.cat([units, torch.ones(1, dtype=F64)]))[:2].exp()
        params = {k: v.clone().requires_grad_() for k, v in w.items()}
        for _ in range(2):
            loss = cross_entropy(torch.func.functional_call(model.module, params, (x,)), y)
            slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {k: v - 0.1 * eta[LAYERS[k]] * g for (k, v), g in zip(params.items(), slopes, strict=True)}
        return params

    w = model.params
    for _ in range(3):
        w = weighted([descend(model, w, *data.train.of(i), steps=2) for i in range(4)], [9, 1, 6, 13])
        optimizer.zero_grad()
        wrong = [
            cross_entropy(model(tuned(w, i), data.val.of(i)[0]), data.val.of(i)[1], reduction="sum") for i in (0, 2, 3)
        ]
        (sum(wrong) / 9).backward()  # type: ignore[union-attr]
        optimizer.step()
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = run(fed, 3)
    assert_equal(server["w"], w)
    assert_equal(server["lam"]["x"], torch.cat([net[k].detach().flatten() for k in sorted(net)]))
    wanted = {c: {k: v.detach() for k, v in tuned(w, i).items()} for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted)
    assert fed.record.gathered == set()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_gradient_by_beta_is_that_of_finite_differences(engine: str) -> None:
    """What comes before beta moves eta too, and with it statistics, which are taken as constants."""
    data = make_data(sizes=EVEN_SIZES)
    model = make_model("normed", data, "mean")
    algorithm = FedL2P(tune_epochs=2, hidden=4)
    draw = torch.Generator().manual_seed(0)
    server = algorithm.server_init(model)
    x = server["lam"]["x"] + 0.3 * torch.randn(server["lam"]["x"].shape, dtype=F64, generator=draw)

    def round_at(x: Tensor) -> tuple[Tensor, Any]:
        fed = federate(algorithm, data, model, engine)
        after = fed.run_round(1, range(4), server | {"lam": server["lam"] | {"x": x}})
        return after["lam"]["first"] / 0.1, fed.record.reported["outer_loss"]

    gradient, _ = round_at(x)
    direction = torch.zeros_like(x)
    direction[-3 * 5 :] = torch.randn(15, dtype=F64, generator=draw)  # beta of three layers, from four units and a bias
    ends = [round_at(x + step * direction)[1] for step in (1e-5, -1e-5)]
    assert abs(float(gradient @ direction)) > 1e-4
    assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(gradient @ direction), rel=1e-6)


def test_the_common_model_is_fedavgs_and_stays_after_its_rounds() -> None:
    data = make_data(sizes=EVEN_SIZES)
    ours, plain = (federate(a, data, make_model("normed", data)) for a in (FedL2P(model_rounds=1), FedAvg()))
    assert_equal(run(ours, 4)["w"], run(plain, 2))  # rounds 0 and 1


def test_statistics_can_be_differentiated() -> None:
    """As BatchNorm written out; and a prediction does not change."""
    data = make_data(sizes=EVEN_SIZES)
    model = make_model("normed", data, "mean")
    draw = torch.Generator().manual_seed(1)
    moved = {k: v + torch.rand(v.shape, dtype=F64, generator=draw) for k, v in model.params.items()}
    tensors = {k: v.requires_grad_() for k, v in moved.items()}

    def plain(x: Tensor) -> Tensor:
        inner = x @ tensors["first.weight"].T + tensors["first.bias"]
        scaled = (inner - tensors["norm.running_mean"]) / (tensors["norm.running_var"] + 1e-5).sqrt()
        inner = torch.tanh(scaled * tensors["norm.weight"] + tensors["norm.bias"])
        return inner @ tensors["out.weight"].T + tensors["out.bias"]

    found, wanted = model(with_derivable_statistics(model, tensors), data.val.x), plain(data.val.x)
    assert_equal(found.detach(), wanted.detach(), 1e-12)
    both = [torch.autograd.grad(out.square().sum(), list(tensors.values())) for out in (found, wanted)]
    assert_equal(list(both[0]), list(both[1]), 1e-10)


def test_statistics_of_inputs() -> None:
    data = make_data()
    model = make_model("mlp", data)
    me = make_me(data, model, client=2)
    assert_equal(input_statistics(me, model.params), statistics(model.params, data.train.of(2)[0]))
