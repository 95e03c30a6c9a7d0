"""pFedHN by hand with a hypernetwork of torch.nn; without hidden units it is FedAvg of equal clients."""

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms._shared.hypernetwork import start
from fedtailor.algorithms.pfedhn import PFedHN
from fedtailor.core.client import onboard
from fedtailor.core.trees import Params, Tree
from tests.helpers import (
    ENGINES,
    F64,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
)


class Hyper(nn.Module):
    """The same network, written as others would."""

    def __init__(self, phi: Tree, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.first, self.second = (self.linear(phi[name]) for name in ("first", "second"))
        self.out = nn.ModuleDict({k.replace(".", "_"): self.linear(phi["out"][k]) for k in shapes})

    @staticmethod
    def linear(values: Params) -> nn.Linear:
        made = nn.Linear(values["weight"].shape[1], values["weight"].shape[0], dtype=F64)
        made.load_state_dict(values)
        return made

    def forward(self, v: Tensor) -> Params:
        units = torch.relu(self.second(torch.relu(self.first(v)))) / self.second.out_features**0.5
        return {k: self.out[k.replace(".", "_")](units).reshape(shape) for k, shape in self.shapes.items()}

    @property
    def phi(self) -> Tree:
        def values(layer: nn.Module) -> Params:
            return {k: v.detach() for k, v in layer.state_dict().items()}

        out = {k: values(self.out[k.replace(".", "_")]) for k in self.shapes}
        return {"first": values(self.first), "second": values(self.second), "out": out}


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = PFedHN(epochs=3, embedding=3, hidden=6, hn_lr=0.7, embedding_lr=0.4)
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = algorithm.server_init(model)
    hyper = Hyper(server["phi"], {k: v.shape for k, v in model.params.items()})
    v = [mine["state"]["v"] for mine in states(fed).values()]
    assert len({float(one[0]) for one in v}) == 4
    for round, cohort in enumerate([range(4), (2, 0)]):
        server = fed.run_round(round, cohort, server)
        target = torch.zeros((), dtype=F64)
        own = {i: v[i].clone().requires_grad_() for i in cohort}
        for i in cohort:
            theta = hyper(own[i])
            trained = descend(model, {k: x.detach() for k, x in theta.items()}, *data.train.of(i), steps=3)
            target = target + sum(((x.detach() - trained[k]) * x).sum() for k, x in theta.items())
        hyper.zero_grad()
        target.backward()
        for i in cohort:
            v[i] = (own[i] - 0.4 * own[i].grad).detach()
        with torch.no_grad():
            for p in hyper.parameters():
                p.sub_(0.7 / len(cohort) * p.grad)  # type: ignore[operator]
    assert_equal(server, {"phi": hyper.phi, "statistics": {}})
    assert_equal({c: mine["state"]["v"] for c, mine in states(fed).items()}, dict(zip(data.clients, v, strict=True)))
    wanted = {c: {k: x.detach() for k, x in hyper(one).items()} for c, one in zip(data.clients, v, strict=True)}
    assert_equal(models(fed, server), wanted)
    assert fed.record.gathered == {"embedding of each client", "model of each client"}


def test_it_begins_near_the_initial_model() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(PFedHN(), data, model)
    for mine in models(fed, fed.engine.experiment.algorithm.server_init(model)).values():
        for k, v in model.params.items():
            assert 0 < float((mine[k] - v).square().mean()) < 4 * float(v.square().mean())


def test_a_newcomer_learns_its_embedding_only() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(PFedHN(embedding=2, embedding_lr=0.3), data, model, solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    v = states(fed)["di"]["state"]["v"]  # as it was drawn: di did not take part
    hyper = Hyper(server["phi"], {k: x.shape for k, x in model.params.items()})
    x, y = data.train.of(3)
    for _ in range(5):
        v = v.detach().requires_grad_()
        nn.functional.cross_entropy(torch.func.functional_call(model.module, hyper(v), (x,)), y).backward()
        v = v - 0.3 * v.grad
    assert_equal(onboard(fed.engine.experiment, 3, server, 5), {k: one.detach() for k, one in hyper(v).items()})


def test_layers_begin_with_the_variance_that_keeps_that_of_rectified_units() -> None:
    """He et al., ICCV 2015: 2 over the number of inputs."""
    data = make_data()
    phi = start(make_model("linear", data), 50, 200, 0, "hypernetwork")
    for layer, inputs in (("first", 50), ("second", 200)):
        weight = phi[layer]["weight"]
        assert float(weight.var()) == pytest.approx(2 / inputs, rel=0.05)
        assert not phi[layer]["bias"].any()
