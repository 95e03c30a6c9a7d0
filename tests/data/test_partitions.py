"""Partitions are disjoint, complete, deterministic and always end; splits keep their promises."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.data import partitions
from fedtailor.data.configs import DigitsConfig, SplitConfig
from fedtailor.data.splits import client_names, split
from fedtailor.errors import DataError

seeds = st.integers(0, 2**40)


def assert_disjoint(parts: list, samples: int) -> np.ndarray:
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < samples
    return together


def assert_covers(parts: list, samples: int) -> None:
    assert sorted(assert_disjoint(parts, samples).tolist()) == list(range(samples))


def same(a: list, b: list) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 200), seeds)
def test_iid_is_complete_and_even(clients: int, more: int, seed: int) -> None:
    parts = partitions.iid(clients + more, clients, seed)
    assert len(parts) == clients
    assert_covers(parts, clients + more)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert same(parts, partitions.iid(clients + more, clients, seed))


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 100), st.integers(1, 7), seeds, st.floats(1e-300, 1e6))
def test_dirichlet_is_complete_and_fills_up(
    clients: int, least: int, more: int, kinds: int, seed: int, alpha: float
) -> None:
    y = np.random.default_rng(seed).integers(kinds, size=clients * least + more)
    parts = partitions.dirichlet(y, clients, seed, alpha, least)
    assert len(parts) == clients
    assert_covers(parts, len(y))
    assert min(map(len, parts)) >= least
    assert same(parts, partitions.dirichlet(y, clients, seed, alpha, least))


def test_dirichlet_alpha_sets_the_skew() -> None:
    y = np.repeat(np.arange(10), 500)

    def largest_share(alpha: float) -> float:
        parts = partitions.dirichlet(y, 10, 0, alpha)
        return float(np.mean([np.bincount(y[p], minlength=10).max() / len(p) for p in parts]))

    assert largest_share(0.05) > 0.5
    assert largest_share(1000.0) < 0.13


def test_seeds_give_other_partitions() -> None:
    y = np.repeat(np.arange(5), 20)
    assert not same(partitions.dirichlet(y, 4, 0, 0.5), partitions.dirichlet(y, 4, 1, 0.5))
    assert not same(partitions.iid(100, 4, 0), partitions.iid(100, 4, 1))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 7), st.integers(1, 25), seeds)
def test_classes_holds_exactly_that_many(each: int, others: int, clients: int, seed: int) -> None:
    kinds = each + others
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(kinds), 30))
    parts = partitions.classes(y, clients, seed, each)
    assert_disjoint(parts, len(y))
    assert [len(np.unique(y[part])) for part in parts] == [each] * clients
    if clients * each >= kinds:
        assert_covers(parts, len(y))
    for label in range(kinds):
        shares = [n for part in parts if (n := int((y[part] == label).sum()))]
        assert not shares or max(shares) - min(shares) <= 1
    assert same(parts, partitions.classes(y, clients, seed, each))


def test_classes_with_a_number_of_samples() -> None:
    y = np.repeat(np.arange(10), 100)
    parts = partitions.classes(y, 10, 3, 3, samples_per_client=50)
    assert [len(part) for part in parts] == [50] * 10
    assert_disjoint(parts, len(y))
    with pytest.raises(DataError, match=r"samples_per_client = 500.*class"):
        partitions.classes(y, 10, 3, 3, samples_per_client=500)


def test_classes_with_too_few_samples_of_one() -> None:
    with pytest.raises(DataError, match=r"\b1\b.*\b2\b.*\b8\b"):
        partitions.classes(np.array([0] * 50 + [1] * 2), 8, 0, 2)


@settings(deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(0, 200),
    seeds,
    st.sampled_from(["lognormal", "dirichlet"]),
    st.floats(0, 50),
)
def test_quantity_is_complete_and_fills_up(
    clients: int, least: int, more: int, seed: int, sizes: Literal["lognormal", "dirichlet"], sigma: float
) -> None:
    samples = clients * least + more
    parts = partitions.quantity(samples, clients, seed, sizes, sigma, 0.1, least)
    assert len(parts) == clients
    assert_covers(parts, samples)
    assert min(map(len, parts)) >= least


def test_quantity_sigma_sets_the_skew() -> None:
    def ratio(sigma: float) -> float:
        sizes = [len(p) for p in partitions.quantity(10_000, 20, 0, "lognormal", sigma)]
        return max(sizes) / min(sizes)

    assert ratio(0.0) < 1.01
    assert ratio(1.5) > 10


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_natural_groups_by_id(ids: list) -> None:
    owners = np.array(ids)
    parts = partitions.natural(owners)
    assert_covers(parts, len(owners))
    assert [np.unique(owners[part]).tolist() for part in parts] == [[i] for i in sorted(set(ids))]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(DataError, match=r"data\.alpha"):
        partitions.dirichlet(np.arange(10), 2, 0, alpha)
    with pytest.raises(DataError, match=r"data\.alpha"):
        DigitsConfig(alpha=alpha)


def test_impossible_numbers_are_named() -> None:
    with pytest.raises(DataError, match=r"data.clients = 11.*10 samples"):
        partitions.iid(10, 11, 0)
    with pytest.raises(DataError, match=r"data.clients = 0"):
        partitions.iid(10, 0, 0)
    with pytest.raises(DataError, match=r"\b10\b.*\b4\b.*min_samples"):
        partitions.dirichlet(np.zeros(10, dtype=np.int64), 3, 0, 1.0)
    with pytest.raises(DataError, match=r"data.classes_per_client.*\b4\b.*\b1\b.*\b3\b"):
        partitions.classes(np.array([0, 1, 2] * 5), 2, 0, 4)


def test_describe_tells_sizes_classes_and_leftovers() -> None:
    notes = partitions.describe([np.array([0, 1]), np.array([2, 3, 4])], np.array([0, 0, 0, 1, 2, 2]))
    numbers = [[float(n) for n in re.findall(r"[\d.]+", note)] for note in notes]
    assert numbers == [[2, 2.5, 3], [1, 2, 3], [1, 6]]


@settings(deadline=None)
@given(st.integers(1, 200), st.floats(0, 0.6), st.floats(0, 0.39), st.booleans(), seeds)
def test_split_is_a_partition_with_all_parts(n: int, test: float, val: float, labelled: bool, seed: int) -> None:
    labels = np.arange(n) % 3 if labelled else None
    cut = split(n, labels, SplitConfig(test=test, val=val), seed=seed, client="a")
    assert sorted([*cut.train, *cut.val, *cut.test]) == list(range(n))
    assert len(cut.train) >= 1
    if n == 2:
        assert (len(cut.test), len(cut.val)) == (int(test > 0), 0)
    if n >= 3:
        assert (len(cut.test) > 0) == (test > 0)
        assert (len(cut.val) > 0) == (val > 0)


def test_split_keeps_class_proportions() -> None:
    labels = np.array([0] * 80 + [1] * 20)
    cut = split(100, labels, SplitConfig(test=0.25, val=0.25), seed=0, client="a")
    assert abs((labels[cut.test] == 1).sum() - 5) <= 1
    assert abs((labels[cut.val] == 1).sum() - 5) <= 1


def test_split_depends_on_seed_and_client_only() -> None:
    def cut(seed: int, client: str) -> list[int]:
        return split(50, None, SplitConfig(), seed=seed, client=client).test.tolist()

    assert cut(0, "a") == cut(0, "a")
    assert cut(0, "a") != cut(0, "b")
    assert cut(0, "a") != cut(1, "a")


def test_max_samples_come_before_the_split() -> None:
    cut = split(100, np.arange(100) % 2, SplitConfig(max_samples=20), seed=0, client="a")
    assert (len(cut.train), len(cut.val), len(cut.test)) == (13, 2, 5)


@pytest.mark.parametrize("values", [{"test": 0.9, "val": 0.1}, {"test": -0.1}, {"val": float("nan")}])
def test_split_fractions_must_leave_something(values: dict) -> None:
    with pytest.raises(DataError, match=r"data.test.*data.val"):
        SplitConfig(**values)


def test_client_names_sort_as_numbers() -> None:
    assert client_names(3) == ("client-00", "client-01", "client-02")
    names = client_names(101)
    assert list(names) == sorted(names)
