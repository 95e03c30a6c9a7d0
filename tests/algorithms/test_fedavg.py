"""FedAvg by hand, and its degenerate cases."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedtailor.algorithms.fedavg import FedAvg
from tests.helpers import FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run, weighted


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_round_by_hand(task: Any) -> None:
    data = make_data(task)
    model = make_model("mlp", data)
    fed = federate(FedAvg(epochs=2), data, model, solver=FULL_BATCH)
    trained = [descend(model, model.params, *data.train.of(i), steps=2) for i in range(4)]
    server = run(fed, rounds=1)
    assert_equal(server, weighted(trained, [9, 1, 6, 13]))
    assert_equal(models(fed, server), dict.fromkeys(data.clients, server), tolerance=0)


def test_one_step_of_everybody_is_a_step_on_pooled_data() -> None:
    data = make_data()
    model = make_model("mlp", data)
    server = run(federate(FedAvg(), data, model, solver=FULL_BATCH), rounds=3)
    assert_equal(server, descend(model, model.params, data.train.x, data.train.y, steps=3))


def test_no_epochs_change_nothing() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedAvg(epochs=0), data, model, solver=replace(FULL_BATCH, weight_decay=1.0))
    assert_equal(run(fed), model.params, 1e-15)


def test_averaged_statistics() -> None:
    data = make_data(sizes={"ada": (9, 0, 0), "cy": (6, 0, 0)})
    model = make_model("normed", data, "mean")
    server = run(federate(FedAvg(), data, model, solver=FULL_BATCH), rounds=1)
    seen = []
    for i in range(2):
        hidden = data.train.of(i)[0] @ model.params["first.weight"].T + model.params["first.bias"]
        seen.append({"norm.running_mean": 0.1 * hidden.mean(0), "norm.running_var": 0.9 + 0.1 * hidden.var(0)})
    assert_equal({k: server[k] for k in seen[0]}, weighted(seen, [9, 6]))
    assert torch.isfinite(server["norm.running_var"]).all()
