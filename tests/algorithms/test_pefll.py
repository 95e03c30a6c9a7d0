"""PeFLL by hand in one graph; without hidden units it is FedAvg of equal clients; newcomers need no training."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedtailor.algorithms.pefll import SPREAD, PeFLL
from fedtailor.core.client import onboard
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.errors import ConfigError
from tests.algorithms.test_pfedhn import Hyper
from tests.helpers import ENGINES, F64, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_by_hand(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = PeFLL(epochs=3, embedding=3, hidden=6, hn_lr=0.7, embedding_lr=0.2)
    fed = federate(algorithm, data, model, engine, FULL_BATCH)
    server = algorithm.server_init(model)
    hyper = Hyper(server["phi"], {k: v.shape for k, v in model.params.items()})
    net = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    mix = server["psi"]["mix"].clone().requires_grad_()
    assert 0.5 < float(mix.detach().std()) / SPREAD < 2

    def describe(i: int) -> Tensor:
        x, y = data.train.of(i)
        return mix @ torch.cat([model(net, x), one_hot(y, 3).to(F64)], 1).mean(0)

    for round, cohort in enumerate([range(4), (2, 0)]):
        server = fed.run_round(round, cohort, server)
        target = torch.zeros((), dtype=F64)
        for i in cohort:
            theta: Params = hyper(describe(i))
            trained = descend(model, {k: x.detach() for k, x in theta.items()}, *data.train.of(i), steps=3)
            for k, x in theta.items():
                target = target + ((x.detach() - trained[k]) * x).sum() / len(cohort)
        for leaf in (*net.values(), mix, *hyper.parameters()):
            leaf.grad = None
        target.backward()
        with torch.no_grad():
            for leaf in (*net.values(), mix):
                leaf.sub_(0.2 * leaf.grad)
            for leaf in hyper.parameters():
                leaf.sub_(0.7 * leaf.grad)  # type: ignore[operator]
    psi = {"net": {k: v.detach() for k, v in net.items()}, "mix": mix.detach()}
    assert_equal(server, {"phi": hyper.phi, "psi": psi, "statistics": {}})
    wanted = {c: {k: x.detach() for k, x in hyper(describe(i)).items()} for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), wanted)
    assert fed.record.gathered == {"descriptor of each client", "model of each client"}


def test_a_newcomer_is_treated_as_everybody() -> None:
    data = make_data()
    fed = federate(PeFLL(), data, make_model("mlp", data))
    server = run(fed, cohort=[0, 1, 2])
    assert_equal(onboard(fed.engine.experiment, 3, server, 5), models(fed, server)["di"], tolerance=0)


def test_a_model_without_a_dense_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.head"):
        PeFLL().check(Model(torch.nn.Linear(2, 2)), "classification")
