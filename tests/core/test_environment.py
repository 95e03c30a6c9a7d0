"""Environments: who works how much, whose replies arrive, and what a missing one means."""

from itertools import pairwise

import pytest
import torch

from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.environment import Environment
from fedtailor.core.federation import Federation
from fedtailor.errors import ConfigError
from fedtailor.experiments.sections import EnvironmentSection
from tests.helpers import EVERYWHERE, FULL_BATCH, assert_equal, descend, federate, make_data, make_model, run, weighted

CLIENTS = (0, 1, 2, 3)
SAMPLES = (9, 1, 6, 13)


def drawn(environment: Environment, rounds: int = 400) -> list[tuple[int, ...]]:
    return [environment.answers(r, 0, CLIENTS, SAMPLES) for r in range(1, rounds + 1)]


def test_draws_follow_from_seed_round_and_exchange() -> None:
    environment = Environment(seed=1, answer=(0.5,) * 4)
    assert drawn(environment) == drawn(environment)
    assert drawn(environment) != drawn(Environment(seed=2, answer=(0.5,) * 4))
    assert [environment.answers(1, e, CLIENTS, SAMPLES) for e in range(20)] != drawn(environment, 20)
    # a client's luck does not depend on who else was asked
    alone = [environment.answers(r, 0, (2,), (6,)) for r in range(1, 401)]
    assert [(2,) if 2 in a else () for a in drawn(environment)] == alone


def test_replies_arrive_as_often_as_said() -> None:
    found = drawn(Environment(answer=(0.2, 0.5, 0.9, 1.0)), 2000)
    shares = [sum(c in a for a in found) / len(found) for c in CLIENTS]
    assert shares == pytest.approx([0.2, 0.5, 0.9, 1.0], abs=0.04)
    assert drawn(Environment(answer=(0.0,) * 4), 3) == [(), (), ()]


def test_a_deadline_leaves_out_the_slow() -> None:
    assert drawn(Environment(deadline=9.0), 1) == [(0, 1, 2)]  # times are 9, 1, 6, 13
    assert drawn(Environment(deadline=9.0, speed=(1, 0.1, 0.5, 2)), 1) == [(0, 3)]  # 9, 10, 12, 6.5
    assert drawn(Environment(deadline=9.0, epochs=(2, 9, 1, 1)), 1) == [(1, 2)]  # 18, 9, 6, 13
    often = drawn(Environment(deadline=9.0, jitter=1.0))
    assert len(set(often)) > 4


def test_who_leaves_does_not_come_back() -> None:
    found = drawn(Environment(leave=0.05), 200)
    assert found[-1] == ()
    assert all(set(b) <= set(a) for a, b in pairwise(found))
    assert len(found[0]) >= 3


@pytest.mark.parametrize("engine", EVERYWHERE)
def test_clients_make_as_many_passes_as_said(engine: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    fed = federate(FedAvg(epochs=2), data, model, engine, FULL_BATCH, environment=Environment(epochs=(1, 3, 2, 1)))
    wanted = [descend(model, model.params, *data.train.of(i), steps=2 * e) for i, e in enumerate((1, 3, 2, 1))]
    assert_equal(run(fed, rounds=1), weighted(wanted, list(SAMPLES)))


def _failing(missing: str, answer: tuple[float, ...]) -> tuple[Federation, dict[str, torch.Tensor]]:
    data = make_data("regression")
    model = make_model("mlp", data)
    environment = EnvironmentSection(missing=missing, answer=answer).build(4, seed=0)  # type: ignore[arg-type]
    fed = federate(FedAvg(), data, model, solver=FULL_BATCH, environment=environment)
    return fed, fed.run_round(1, CLIENTS, model.params)


@pytest.mark.parametrize(("missing", "counted"), [("renormalise", 0.0), ("stale", 7.0)])
def test_a_missing_reply_is_left_out_or_counts_as_the_model_that_was_sent(missing: str, counted: float) -> None:
    fed, w = _failing(missing, (1.0, 0.0, 0.0, 1.0))
    assert (fed.cohort, fed.attendance.missed) == ((0, 3), [(1, 2)])
    model, data = fed.engine.experiment.model, fed.engine.experiment.data
    trained = [descend(model, model.params, *data.train.of(i), steps=1) for i in (0, 3)]
    assert_equal(w, weighted([*trained, model.params], [9, 13, int(counted)]))


@pytest.mark.parametrize("missing", ["renormalise", "stale"])
def test_when_nobody_answers_everything_is_as_before(missing: str) -> None:
    fed, w = _failing(missing, (0.0,) * 4)
    assert all(torch.equal(v, w[k]) for k, v in fed.engine.experiment.model.params.items())
    assert (fed.traffic.up, fed.attendance.missed) == (0, [CLIENTS])


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.answer.*\b2\b.*\b3\b"):
        EnvironmentSection(answer=(1.0, 0.5)).build(3, 0)
    with pytest.raises(ConfigError, match=r"environment\.answer.*1\.5.*\b0\b.*\b1\b"):
        EnvironmentSection(answer=(1.0, 1.5)).build(2, 0)
    with pytest.raises(ConfigError, match=r"environment\.epochs.*\b0\b.*\b1\b.*1e\+06"):
        EnvironmentSection(epochs=(0, 1)).build(2, 0)
