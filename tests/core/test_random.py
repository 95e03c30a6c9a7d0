"""Streams are named: equal names give equal numbers, other names others, and nobody else's generator moves."""

from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.core import random
from fedtailor.core.random import brief_stream, stream, torch_stream

keys = st.lists(st.integers(-3, 30) | st.text("ab0123", max_size=3), max_size=3)


@given(keys, keys)
def test_equal_keys_equal_numbers(a: list[int | str], b: list[int | str]) -> None:
    found, again, other = (stream(*key).integers(2**62, size=4).tolist() for key in (a, a, b))
    assert found == again
    assert (found == other) == (a == b)


def test_a_number_is_not_its_text() -> None:
    assert stream(1, "a").random() != stream("1", "a").random()
    assert stream(1, 23).random() != stream(12, 3).random()


def test_numbers_do_not_change_between_versions() -> None:
    assert stream(3, 0, "ada", "batches").permutation(6).tolist() == [3, 0, 2, 1, 5, 4]


def test_torch_stream() -> None:
    state = torch.random.get_rng_state()
    with torch_stream(1, "model"):
        first = torch.rand(3)
    np.random.seed(0)  # noqa: NPY002 - a global seed must not matter
    torch.rand(1)
    with torch_stream(1, "model"):
        again = torch.rand(3)
    with torch_stream(2, "model"):
        other = torch.rand(3)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.random.set_rng_state(state)
    with torch_stream(1, "model"):
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), state)


@given(keys, st.integers(1, 50))
def test_a_brief_stream_gives_the_numbers_of_a_stream(key: list[int | str], n: int) -> None:
    other = brief_stream("another")
    other.integers(3)  # leaves half a word behind
    long, brief = stream(*key), brief_stream(*key)
    assert np.array_equal(long.permutation(n), brief.permutation(n))
    assert np.array_equal(long.integers(2**32, size=3, dtype="uint64"), brief.integers(2**32, size=3, dtype="uint64"))
    assert long.normal() == brief.normal()


def test_brief_streams_of_threads_are_apart() -> None:
    first = brief_stream("first")
    thread = Thread(target=lambda: brief_stream("second").random(7))
    thread.start()
    thread.join()
    assert first.random() == stream("first").random()


def test_the_generator_of_a_device_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model draws on a device is found, and that device's own generator goes on as if it had not."""
    states = iter([torch.tensor([1]), torch.tensor([2])])  # before and after
    put_back = []
    monkeypatch.setattr(random, "_state_on", lambda device: next(states))
    monkeypatch.setattr(random, "_put_back", lambda state, device: put_back.append((state.tolist(), device)))
    before = torch.get_rng_state()
    with pytest.raises(random.Draws), random.undrawn(torch.device("cuda")):
        torch.rand(1)
    assert put_back == [([1], torch.device("cuda"))]
    assert torch.equal(torch.get_rng_state(), before)
