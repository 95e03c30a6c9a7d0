"""pFedLA by hand, by either gradient; without steps of the hypernetworks it is FedAvg before the average."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.pfedla import PFedLA
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, items, tree_map
from tests.algorithms.test_cfl import two_groups
from tests.algorithms.test_scaffold import EQUAL_SIZES
from tests.helpers import ENGINES, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run

LAYERS = {"hidden.0": 0, "out": 1}


def mixture(hn: Any, models: list[Params], at: list[int]) -> Params:
    """theta_bar of one client, written out."""
    units = torch.relu(hn["hidden"]["weight"] @ hn["hidden"]["v"] + hn["hidden"]["bias"])
    made: Params = {}
    for k in models[0]:
        out = hn["alpha"][:, LAYERS[k.rpartition(".")[0]]]
        scores = torch.stack([(units * out[:-1, j]).sum() / 32**0.5 + out[-1, j] for j in at])
        shares = scores.exp() / scores.exp().sum()
        made[k] = sum(share * one[k] for share, one in zip(shares, models, strict=True))
    return made


def trained(model: Model, params: Params, x: Tensor, y: Tensor, steps: int) -> Params:
    """Gradient descent that can be differentiated."""
    for _ in range(steps):
        loss = cross_entropy(torch.func.functional_call(model.module, params, (x,)), y)
        slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {k: v - 0.1 * g for (k, v), g in zip(params.items(), slopes, strict=True)}
    return params


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gradient", ["change", "exact"])
def test_rounds_by_hand(gradient: Any, engine: str) -> None:
    """In the first round all models are equal and nothing is learned; the third has two clients, who know of all."""
    data = make_data()
    model = make_model("mlp", data)
    algorithm = PFedLA(epochs=2, hn_lr=3.0, gradient=gradient)
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = fed.run_round(0, range(4), algorithm.server_init(model))
    own = [{part: server[part][c] for part in ("hidden", "alpha")} for c in data.clients]
    theta = [descend(model, model.params, *data.train.of(i), steps=2) for i in range(4)]
    assert_equal(server["w"], dict(zip(data.clients, theta, strict=True)))
    assert not any(bool(mine["alpha"].any()) for mine in own)
    for round, cohort in enumerate([(0, 1, 2, 3), (2, 0)], start=1):
        new = list(theta)
        for i in cohort:
            hn = tree_map(lambda v: v.clone().requires_grad_(), own[i])
            theta_bar = mixture(hn, theta, [0, 1, 2, 3])
            after = trained(model, theta_bar, *data.train.of(i), steps=2)
            new[i] = {k: v.detach() for k, v in after.items()}
            if gradient == "exact":
                x, y = data.val.of(i)
                target = cross_entropy(model(after, x), y) if len(x) else 0 * sum(v.sum() for v in after.values())
            else:  # the product of minus the change with the Jacobian of theta_bar
                target = sum(((theta_bar[k] - after[k]).detach() * theta_bar[k]).sum() for k in theta_bar)
            paths = dict(items(hn))
            slopes = torch.autograd.grad(target, list(paths.values()))  # type: ignore[arg-type]
            step = dict(zip(paths, slopes, strict=True))
            own[i] = {
                "hidden": {k: v.detach() - 3 * step[f"hidden/{k}"] for k, v in hn["hidden"].items()},
                "alpha": hn["alpha"].detach() - 3 * step["alpha"],
            }
        theta = new
        server = fed.run_round(round, cohort, server)
    assert_equal(server["w"], dict(zip(data.clients, theta, strict=True)))
    assert_equal(models(fed, server), dict(zip(data.clients, theta, strict=True)))
    for part in ("hidden", "alpha"):
        assert_equal(server[part], {c: mine[part] for c, mine in zip(data.clients, own, strict=True)})
    assert float(server["alpha"]["ada"].abs().max()) > 1e-4


def test_without_steps_of_the_hypernetworks_it_is_fedavg_before_the_average() -> None:
    data = make_data(sizes=EQUAL_SIZES)
    model = make_model("mlp", data)
    ours = federate(PFedLA(hn_lr=0.0), data, model, solver=FULL_BATCH)
    w = run(federate(FedAvg(), data, model, solver=FULL_BATCH), 2)
    wanted = {c: descend(model, w, *data.train.of(i), steps=1) for i, c in enumerate(data.clients)}
    assert_equal(models(ours, run(ours, 3)), wanted)


@pytest.mark.parametrize("gradient", ["change", "exact"])
def test_those_that_are_alike_find_each_other(gradient: Any) -> None:
    data, model = two_groups()
    fed = federate(PFedLA(epochs=2, gradient=gradient), data, model, "vmap")
    server = run(fed, 10)
    scores = torch.stack([server["alpha"][c][-1, 0] for c in data.clients])
    alike = (torch.arange(6)[:, None] - torch.arange(6)) % 2 == 0
    assert float(scores[alike].mean()) > 0 > float(scores[~alike].mean())
