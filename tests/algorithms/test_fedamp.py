"""FedAMP by hand; without pull it is Local; clients that are alike find each other."""

from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.algorithms.fedamp import FedAMP
from fedtailor.core.trees import Params
from tests.algorithms.test_cfl import two_groups
from tests.helpers import ENGINES, F64, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run


def vector(params: Params) -> Tensor:
    return torch.cat([params[k].flatten() for k in sorted(params)])


def distance_weights(i: int, w: dict[int, Params], alpha: float, sigma: float) -> dict[int, float]:
    xi = {j: alpha * exp(-float((vector(w[i]) - vector(w[j])).square().sum()) / sigma) / sigma for j in w if j != i}
    return xi | {i: 1 - sum(xi.values())}


def cosine_weights(i: int, w: dict[int, Params], sigma: float, own: float) -> dict[int, float]:
    e = {j: exp(sigma * float(torch.cosine_similarity(vector(w[i]), vector(w[j]), dim=0))) for j in w if j != i}
    return {j: (1 - own) * v / sum(e.values()) for j, v in e.items()} | {i: own}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_rounds_by_hand(attention: Any, engine: str) -> None:
    """The second round has three clients, the third the fourth as well, of which the server knows nothing yet."""
    data = make_data()
    model = make_model("mlp", data)
    algorithm = FedAMP(epochs=3, mu=0.4, attention=attention, alpha=0.2, sigma=0.8, self_weight=0.3)
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = algorithm.server_init(model)
    w: dict[int, Params] = {}
    for round, cohort in enumerate([(0, 1, 2), (2, 0), (3, 2, 1)]):
        server = fed.run_round(round, cohort, server)
        w = {i: model.params for i in cohort if i not in w} | w
        new = {}
        for i in cohort:
            xi = distance_weights(i, w, 0.2, 0.8) if attention == "distance" else cosine_weights(i, w, 0.8, 0.3)
            u = {k: sum(share * w[j][k] for j, share in xi.items()) for k in model.params}
            new[i] = descend(model, w[i], *data.train.of(i), steps=3, center=u, mu=0.4)  # type: ignore[arg-type]
        w = w | new
    assert_equal(server["w"], {data.clients[i]: one for i, one in w.items()})
    assert_equal(models(fed, server), {data.clients[i]: one for i, one in w.items()})
    assert fed.record.gathered == {"model of each client"}


def test_weights_add_up_and_are_not_negative() -> None:
    w = torch.randn(30, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    for algorithm in (FedAMP(alpha=5.0), FedAMP(attention="cosine", sigma=9.0), FedAMP(alpha=0.0)):
        xi = algorithm.weights(w)
        assert float(xi.min()) >= -1e-15
        assert_equal(xi.sum(1), torch.ones(30, dtype=F64), 1e-15)
        assert_equal(algorithm.weights(w[:1]), torch.ones(1, 1, dtype=F64))  # nobody else there
    assert_equal(FedAMP(alpha=0.0).weights(w), torch.eye(30, dtype=F64))


@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_those_that_are_alike_find_each_other(attention: Any) -> None:
    data, model = two_groups()
    algorithm = FedAMP(epochs=2, attention=attention, sigma=5.0)
    fed = federate(algorithm, data, model, "vmap")
    w = run(fed, 15)["w"]
    xi = algorithm.weights(torch.stack([vector(w[c]) for c in data.clients]))
    alike = (torch.arange(6)[:, None] - torch.arange(6)) % 2 == 0
    others = ~torch.eye(6, dtype=torch.bool)
    assert float(xi[alike & others].min()) > float(xi[~alike].max())
