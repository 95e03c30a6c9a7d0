"""FedDyn by hand in the paper's own variables; its first round from FedProx; it ends where the common loss is least."""

import pytest
import torch

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.feddyn import FedDyn
from fedtailor.algorithms.fedprox import FedProx
from fedtailor.core.trees import Params
from tests.algorithms.test_scaffold import EQUAL_SIZES, away_from_the_minimum, slope
from tests.helpers import ENGINES, FULL_BATCH, assert_equal, federate, make_data, make_model, models, run, states

ALPHA = 0.7


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_by_hand(engine: str) -> None:
    """With the gradients of the paper, not scaled; the last round has two of the four clients."""
    data = make_data()
    model = make_model("mlp", data)
    theta = model.params
    h = {k: torch.zeros_like(v) for k, v in theta.items()}
    gradient = [h] * 4
    fed = federate(FedDyn(epochs=3, alpha=ALPHA), data, model, engine, FULL_BATCH)
    server = fed.engine.experiment.algorithm.server_init(model)
    for round, cohort in enumerate([range(4), range(4), (2, 0)]):
        server = fed.run_round(round, cohort, server)
        trained: list[Params] = []
        for i in cohort:
            w = theta
            for _ in range(3):
                g = slope(model, w, data, i)
                w = {k: v - 0.1 * (g[k] - gradient[i][k] + ALPHA * (v - theta[k])) for k, v in w.items()}
            gradient[i] = {k: v - ALPHA * (w[k] - theta[k]) for k, v in gradient[i].items()}
            trained.append(w)
        h = {k: v - ALPHA / 4 * torch.stack([w[k] - theta[k] for w in trained]).sum(0) for k, v in h.items()}
        mean = {k: torch.stack([w[k] for w in trained]).mean(0) for k in theta}
        theta = {k: v - h[k] / ALPHA for k, v in mean.items()}
    assert_equal(server, {"theta": theta, "h": {k: v / ALPHA for k, v in h.items()}})
    for i, mine in enumerate(states(fed).values()):
        assert_equal(mine["state"], {k: v / ALPHA for k, v in gradient[i].items()})
    serving = federate(FedDyn(serve="mean"), data, model, engine)
    assert_equal(models(serving, server)["ada"], mean)


def test_the_first_round_goes_twice_as_far_as_fedprox() -> None:
    data = make_data(sizes=EQUAL_SIZES)
    model = make_model("mlp", data)
    ours, prox = (federate(a, data, model) for a in (FedDyn(epochs=2, alpha=0.3), FedProx(epochs=2, mu=0.3)))
    found = run(prox, 1)
    assert_equal(run(ours, 1)["theta"], {k: 2 * found[k] - v for k, v in model.params.items()})


def test_it_ends_where_the_common_loss_is_least() -> None:
    assert away_from_the_minimum(FedDyn(epochs=10, alpha=1.0), 80) < 1e-5
    assert away_from_the_minimum(FedAvg(epochs=10), 80) > 1e-2
