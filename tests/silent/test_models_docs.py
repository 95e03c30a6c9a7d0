"""Methods: who is served by which model."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedtailor.algorithms.cfl import CFL
from fedtailor.core.client import onboard
from fedtailor.core.trees import Params
from fedtailor.metrics.evaluation import evaluate
from tests.algorithms.test_cfl import AT_ONCE, two_groups
from tests.helpers import FULL_BATCH, assert_equal, descend, federate, make_data, make_model, run


def test_a_newcomer_to_clusters_is_not_given_the_model_from_before_they_parted() -> None:
    data, model = two_groups()
    fed = federate(replace(AT_ONCE, first_rounds=20), data, model, solver=FULL_BATCH)
    server = run(fed, 60, cohort=[0, 1, 2, 3])
    of_group = [onboard(fed.engine.experiment, i, server, 0) for i in range(6)]
    assert_equal(of_group[4], of_group[0], tolerance=0)
    assert_equal(of_group[5], of_group[1], tolerance=0)
    for i in (4, 5):  # without any training of their own beyond the way down
        found = evaluate(fed.engine.experiment, [i], of_group[i], ["test"], is_stacked=False)
        assert float(found["test"]["accuracy"]) > 0.8


def test_the_way_down_by_hand() -> None:
    data = make_data()
    model = make_model("mlp", data)
    algorithm = CFL(epochs=2, max_clusters=3)
    fed = federate(algorithm, data, model, solver=FULL_BATCH)
    server = algorithm.server_init(model)
    nodes = [{k: v + 0.1 * node for k, v in model.params.items()} for node in range(5)]
    server["w"] = {k: torch.stack([node[k] for node in nodes]) for k in model.params}
    server["child"] = torch.tensor([1, 3, 0, 0, 0])  # the root has the halves 1 and 2; 1 has 3 and 4
    newcomer = data.train.of(3)

    def pull(w: Params) -> torch.Tensor:
        trained = descend(model, w, *newcomer, steps=2)
        return torch.cat([(trained[k] - w[k]).flatten() for k in sorted(model.trainable)])

    for directions, leaf in (([-1, 1, 0, 0], 2), ([1, -1, 1, -1], 3), ([1, -1, -1, 1], 4)):
        # the longer arrow is not the nearer one: lengths of directions do not count
        scale = [5.0 if sign < 0 else 0.2 for sign in directions]
        pulls = [pull(nodes[0]), pull(nodes[0]), pull(nodes[1]), pull(nodes[1])]
        arrows = [sign * size * way for sign, size, way in zip(directions, scale, pulls, strict=True)]
        server["direction"] = torch.stack([torch.zeros_like(pulls[0]), *arrows])
        assert_equal(onboard(fed.engine.experiment, 3, server, 0), nodes[leaf], tolerance=0)
