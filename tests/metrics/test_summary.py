"""Mean, spread, worst tenth and share of clients hurt, by hand."""

from __future__ import annotations

import math

import pytest

from fedtailor.metrics.summary import Summary, over_seeds, share_hurt, summarise

NAN = math.nan


def test_mean_and_spread_by_hand() -> None:
    found = summarise([1.0, 3.0, 5.0, 7.0], higher_is_better=True)
    assert found == Summary(4.0, math.sqrt(5.0), 1.0, 4)
    assert summarise([1.0, 3.0, 5.0, 7.0], higher_is_better=False).worst_tenth == 7.0


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (10, 1), (14, 1), (16, 2), (30, 3), (100, 10)])
def test_worst_tenth_is_a_tenth_but_at_least_one(clients: int, tenth: int) -> None:
    values = [float(i) for i in reversed(range(clients))]
    assert summarise(values, higher_is_better=True).worst_tenth == sum(range(tenth)) / tenth
    assert summarise(values, higher_is_better=False).worst_tenth == sum(range(clients - tenth, clients)) / tenth


def test_clients_without_samples_do_not_count() -> None:
    assert summarise([NAN, 2.0, NAN, 4.0], higher_is_better=True) == Summary(3.0, 1.0, 2.0, 2)
    nothing = summarise([NAN, NAN], higher_is_better=True)
    assert nothing.clients == 0
    assert all(math.isnan(v) for v in (nothing.mean, nothing.std, nothing.worst_tenth))


def test_a_client_that_is_wrong_without_limit_counts() -> None:
    assert summarise([1.0, math.inf], higher_is_better=False) == Summary(math.inf, math.inf, math.inf, 2)
    assert share_hurt([math.inf, 1.0], [2.0, 2.0], higher_is_better=False) == 0.5


def test_over_seeds() -> None:
    assert over_seeds([1.0, 3.0]) == (2.0, math.sqrt(2.0))
    alone, wild = over_seeds([1.0]), over_seeds([1.0, math.inf])
    assert (alone[0], wild[0]) == (1.0, math.inf)
    assert math.isnan(alone[1])
    assert math.isnan(wild[1])


def test_share_hurt_by_hand() -> None:
    values, local = [0.5, 0.6, 0.7, 0.8], [0.6, 0.6, 0.6, 0.9]
    assert share_hurt(values, local, higher_is_better=True) == 0.5  # equal is not hurt
    assert share_hurt(values, local, higher_is_better=False) == 0.25
    assert share_hurt([0.5, NAN, 0.7], [0.6, 0.1, NAN], higher_is_better=True) == 1.0
    assert math.isnan(share_hurt([NAN], [0.5], higher_is_better=True))
    with pytest.raises(ValueError, match="longer"):
        share_hurt([0.5], [0.5, 0.6], higher_is_better=True)
