"""lp-proj by hand on flat vectors; Local and Ditto are special cases; only q numbers travel."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.ditto import Ditto
from fedtailor.algorithms.lp_proj import LpProj
from fedtailor.core.federation import Traffic
from fedtailor.core.trees import Params
from tests.helpers import F64, FULL_BATCH, SIZES, assert_equal, federate, make_data, make_model, models, run


def flat(params: Params) -> Tensor:
    return torch.cat([params[k].flatten() for k in sorted(params)])


def matrix(parts: Params) -> Tensor:
    return torch.cat([parts[k] for k in sorted(parts)], dim=1)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("p", [1, 2])
def test_rounds_by_hand(p: Literal[1, 2], rounds: int) -> None:
    data = make_data("regression")
    model = make_model("linear", data)
    algorithm = LpProj(p=p, q=4, lam=0.6, eta=0.3, local_rounds=3, epochs=2)
    projection = matrix(algorithm.projection(model))
    start = flat(model.params)  # the bias, then the rows of the weight
    thetas, u = [start] * 4, torch.zeros(4, dtype=F64)

    def gradient(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        error = x @ theta[3:].reshape(3, 4).T + theta[:3] - y
        return torch.cat([error.sum(0), (error.T @ x).flatten()]) * 2 / error.numel()

    for _ in range(rounds):
        received, sent = u, []
        for i in range(4):
            theta, u = thetas[i], received
            for _ in range(3):
                for _ in range(2):
                    c = u - projection @ (theta - start)
                    pull = torch.sign(c) * c.abs() ** (p - 1)
                    theta = theta - 0.1 * (gradient(theta, *data.train.of(i)) - 0.6 * projection.T @ pull)
                c = u - projection @ (theta - start)
                u = u - 0.3 * 0.6 * torch.sign(c) * c.abs() ** (p - 1)
            thetas[i] = theta
            sent.append(u)
        u = torch.stack(sent).mean(0)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)  # an epoch is a single step
    server = run(fed, rounds)
    assert_equal(server, u)
    found = models(fed, server)
    assert_equal({name: flat(found[name]) for name in found}, dict(zip(data.clients, thetas, strict=True)))


def test_in_all_directions_the_first_pull_is_that_of_ditto() -> None:
    data = make_data()
    model = make_model("mlp", data)
    proj = federate(LpProj(p=2, q=1000, lam=0.8, local_rounds=1), data, model)
    ditto = federate(Ditto(lam=0.8), data, model)
    assert len(run(proj, rounds=0)) == sum(v.numel() for v in model.params.values())
    assert_equal(models(proj, run(proj, rounds=1)), models(ditto, run(ditto, rounds=1)))


def test_the_projection_has_orthonormal_rows_and_follows_from_its_seed() -> None:
    model = make_model("mlp", make_data())
    first, again, other = (matrix(LpProj(projection_seed=s).projection(model)) for s in (0, 0, 1))
    assert_equal(first @ first.T, torch.eye(10, dtype=F64), 1e-12)
    assert torch.equal(first, again)
    assert float((first - other).abs().max()) > 0.1


def test_only_q_numbers_travel() -> None:
    def traffic(q: int, model: str) -> Traffic:
        data = make_data()
        fed = federate(LpProj(q=q), data, make_model(model, data), "wire")
        run(fed)
        return fed.traffic

    few, many = traffic(13, "mlp"), traffic(26, "mlp")
    calls = 3 * len(SIZES)
    assert many.up - few.up == many.down - few.down == calls * 13 * 8  # of 8 bytes each
    assert few.up < calls * (13 * 8 + 200)  # the rest names what it is
    assert traffic(13, "linear") == few  # whatever the size of the model
