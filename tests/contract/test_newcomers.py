"""A client that comes to a federation already trained: every algorithm has a model for it, and nobody is touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedtailor.algorithms import make
from fedtailor.core.client import onboard
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.metrics.evaluation import evaluate
from tests.helpers import (
    EVEN_SIZES,
    FULL_BATCH,
    assert_equal,
    brief,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    suits,
    usual,
    variants,
)

VARIANTS = {name: brief(algorithm) for name, algorithm in variants().items()}
NEW = 3


def federation(algorithm: str) -> Federation:
    normed: dict[str, Any] = {"model": "normed", "sizes": EVEN_SIZES}
    case = normed if suits(VARIANTS[algorithm], normed) else usual(VARIANTS[algorithm])
    model = case.pop("model", "mlp")
    data = make_data(**case)
    return federate(VARIANTS[algorithm], data, make_model(model, data))


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_a_newcomer_has_a_model_and_the_others_are_untouched(algorithm: str) -> None:
    fed = federation(algorithm)
    server = run(fed, cohort=[0, 1, 2])
    setting, before = fed.engine.experiment, tree_map(torch.clone, (server, states(fed)))
    model = onboard(setting, NEW, server, 4)
    assert_equal((server, states(fed)), before, tolerance=0)
    assert_equal(onboard(setting, NEW, server, 4), model, tolerance=0)
    assert set(model) == set(models(fed, server)["di"])
    assert all(bool(torch.isfinite(v).all()) for v in model.values())
    (metric, *_) = evaluate(setting, [NEW], model, ["train"], is_stacked=False)["train"].values()
    assert torch.isfinite(metric).all()


# what is trained, and what stays as the server has it
TRAINED: dict[str, Callable[[Model, Tree], tuple[Params, Params]]] = {
    "local": lambda model, server: (model.params, {}),
    "fedavg": lambda model, server: (server, {}),
    "fedadp": lambda model, server: (server["w"], {}),
    "cfl": lambda model, server: ({k: v[0] for k, v in server["w"].items()}, {}),
    "ditto": lambda model, server: (server, {}),
    "pfedme": lambda model, server: (server, {}),
    "fedrep": lambda model, server: (model.head, server),
    "fedper": lambda model, server: (model.head, server),
    "lg-fedavg": lambda model, server: (model.body, server),
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_a_newcomer_trains(name: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    fed = federate(make(name, {}), data, model, solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    own, frozen = TRAINED[name](model, server)
    mu = 1.0 if name in ("ditto", "pfedme") else 0.0  # these hold it near the common model
    wanted = descend(model, own, *data.train.of(NEW), steps=4, frozen=frozen, center=own, mu=mu)
    assert_equal(onboard(fed.engine.experiment, NEW, server, 4), frozen | wanted)


@pytest.mark.parametrize("name", ["fedavg+ft", "fedprox+ft", "fedbabu", "knn-per"])
def test_what_fits_each_client_anyway_fits_a_newcomer(name: str) -> None:
    data = make_data()
    fed = federate(make(name, {}), data, make_model("mlp", data), solver=FULL_BATCH)
    server = run(fed, cohort=[0, 1, 2])
    assert_equal(onboard(fed.engine.experiment, NEW, server, 4), models(fed, server)["di"])
