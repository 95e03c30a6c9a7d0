"""local.refit: a private part is fitted to the common part that it is served on, by one rule for every method."""

from dataclasses import replace

import pytest
import torch

from fedtailor.algorithms import make
from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.trees import Params
from fedtailor.experiments.config import parse
from tests.helpers import ENGINES, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, models, run

EPOCHS = 2


def served(name: str, refit: int, engine: str = "loop") -> tuple[FederatedData, Model, dict[str, Params]]:
    """The data, the model, and with what each of four clients predicts after two rounds."""
    data = make_data()
    model = make_model("mlp", data)
    solver = replace(FULL_BATCH, refit=refit)
    fed = federate(make(name, {}), data, model, engine, solver=solver)
    server = run(fed, rounds=2)
    return data, model, models(fed, server)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedeq"])
def test_heads_are_fitted_with_the_body_held_still(name: str, engine: str) -> None:
    data, model, stale = served(name, 0)
    _, _, fresh = served(name, EPOCHS, engine)
    for i, client in enumerate(data.clients):
        body = {k: stale[client][k] for k in model.body}
        head = {k: stale[client][k] for k in model.head}
        fitted = descend(model, head, *data.train.of(i), steps=EPOCHS, frozen=body)
        assert_equal(fresh[client], body | fitted)


def test_bodies_are_fitted_with_the_head_held_still() -> None:
    data, model, stale = served("lg-fedavg", 0)
    _, _, fresh = served("lg-fedavg", EPOCHS)
    for i, client in enumerate(data.clients):
        body, head = ({k: stale[client][k] for k in part} for part in (model.body, model.head))
        assert_equal(fresh[client], descend(model, body, *data.train.of(i), steps=EPOCHS, frozen=head) | head)


def test_only_entries_that_a_client_selected_are_fitted() -> None:
    data, model, stale = served("fedselect", 0)
    _, _, fresh = served("fedselect", EPOCHS)
    moved, common = 0, 0
    for client in data.clients:
        for k in model.params:
            apart = torch.stack([stale[c][k] for c in data.clients]).std(0) > 0
            change = fresh[client][k] != stale[client][k]
            moved, common = moved + int(change.sum()), common + int((~apart).sum())
            assert not change[~apart].any()  # equal at all clients: nobody's own
    assert moved
    assert common


@pytest.mark.parametrize("name", ["fedavg", "ditto", "local", "fedala", "fedavg+ft", "ifca"])
def test_what_has_no_private_part_on_a_common_one_stays(name: str) -> None:
    assert_equal(served(name, EPOCHS)[2], served(name, 0)[2], 0)


@pytest.mark.parametrize("name", ["fedrod", "fedcp", "fedpac"])
def test_methods_with_a_loss_of_their_own_fit_by_it(name: str) -> None:
    (data, model, stale), (_, _, fresh) = served(name, 0), served(name, EPOCHS)
    for client in data.clients:
        assert_equal({k: fresh[client][k] for k in model.body}, {k: stale[client][k] for k in model.body}, 0)
    assert any(not torch.equal(fresh[c][k], v) for c in data.clients for k, v in stale[c].items())


def test_it_is_an_option_of_the_run() -> None:
    assert parse({"local": {"refit": 3}}).local.build(1).refit == 3
    assert parse({}).local.build(1).refit == 0
