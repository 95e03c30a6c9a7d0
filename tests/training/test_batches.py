"""Batches: every row once per pass, padding that weighs nothing, clients that stop when they are done."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.training.batches import Batch, PerSample, ahead, single, stacked, whole, with_places

counts = st.lists(st.integers(1, 9), min_size=1, max_size=5)
sizes = st.integers(1, 11)
passes = st.integers(0, 3)


def orders_of(n: int, passes: int) -> list[np.ndarray]:
    rng = np.random.default_rng([n, passes])
    return [rng.permutation(n) for _ in range(passes)]


@given(st.integers(1, 20), sizes, passes, st.integers(0, 50))
def test_single(n: int, batch_size: int, epochs: int, start: int) -> None:
    batches = single(start, orders_of(n, epochs), batch_size)
    per_epoch = -(-n // batch_size)
    assert len(batches) == epochs * per_epoch
    for e in range(epochs):
        epoch = batches[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(torch.cat([b.rows for b in epoch]).tolist()) == list(range(start, start + n))
        assert all(len(b.rows) == batch_size for b in epoch[:-1])
    assert all(b.weight is None and b.active is None for b in batches)


@given(counts, sizes, passes)
def test_stacked_is_single_side_by_side(ns: list[int], batch_size: int, epochs: int) -> None:
    starts = [0, *np.cumsum(ns)[:-1].tolist()]
    orders = [orders_of(n, epochs) for n in ns]
    batches = stacked(starts, orders, batch_size, torch.float64)
    alone = [single(start, order, batch_size) for start, order in zip(starts, orders, strict=True)]
    assert len(batches) == max(map(len, alone))
    for step, batch in enumerate(batches):
        assert batch.rows.shape[0] == len(ns)
        assert 0 <= int(batch.rows.min()) <= int(batch.rows.max()) < sum(ns)  # padding too points at real rows
        weight = torch.ones(batch.rows.shape) if batch.weight is None else batch.weight
        active = torch.ones(len(ns), dtype=torch.bool) if batch.active is None else batch.active
        for client, mine in enumerate(alone):
            wanted = mine[step].rows.tolist() if step < len(mine) else []
            assert batch.rows[client][weight[client].bool()].tolist() == wanted
            assert bool(active[client]) == bool(wanted)


@given(counts, sizes)
def test_weights_are_there_only_where_something_is_padded(ns: list[int], batch_size: int) -> None:
    starts = [0, *np.cumsum(ns)[:-1].tolist()]
    for batch in stacked(starts, [orders_of(n, 2) for n in ns], batch_size, torch.float64):
        if batch.weight is not None:
            assert batch.weight.dtype == torch.float64
            assert set(batch.weight.unique().tolist()) == {0, 1}
        if batch.active is not None:
            assert batch.active.any()
            assert not batch.active.all()


@given(st.integers(1, 20), sizes, st.integers(1, 4), st.integers(1, 2))
def test_clients_of_equal_size_need_no_padding(n: int, batch_size: int, clients: int, epochs: int) -> None:
    # BatchNorm counts on it: its statistics would see the padding
    starts = [n * i for i in range(clients)]
    for batch in stacked(starts, [orders_of(n, epochs)] * clients, batch_size, torch.float64):
        assert batch.weight is None
        assert batch.active is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), sizes)
def test_whole_is_every_row_in_order(ns: list[int], batch_size: int) -> None:
    starts = [0, *np.cumsum(ns)[:-1].tolist()]
    found: list[list[int]] = [[] for _ in ns]
    for batch in whole(starts, ns, batch_size, torch.float64):
        weight = torch.ones(batch.rows.shape) if batch.weight is None else batch.weight
        for client in range(len(ns)):
            found[client] += batch.rows[client][weight[client].bool()].tolist()
    assert found == [list(range(start, start + n)) for start, n in zip(starts, ns, strict=True)]


@given(counts, sizes, st.integers(1, 3))
def test_what_is_kept_per_sample_is_the_same_alone_and_stacked(ns: list[int], batch_size: int, epochs: int) -> None:
    starts = [0, *np.cumsum(ns)[:-1].tolist()]
    orders = [orders_of(n, epochs) for n in ns]
    together = stacked(starts, orders, batch_size, torch.float64)
    alone = [single(start, order, batch_size) for start, order in zip(starts, orders, strict=True)]
    like = torch.zeros(1, dtype=torch.float64)
    together, places = with_places(together)
    kept = PerSample(places, (2,), like)
    alone = [with_places(batches)[0] for batches in alone]
    own = [PerSample(n + 1, (2,), like) for n in ns]
    for step, batch in enumerate(together):
        before = kept.read(batch)
        after = 2 * before + batch.rows[..., None] + step
        kept.write(batch, after)
        assert before.data_ptr() != after.data_ptr()
        for client, batches in enumerate(alone):
            if step < len(batches):
                mine = own[client].read(batches[step])
                assert torch.equal(mine, before[client, : len(mine)])
                own[client].write(batches[step], 2 * mine + batches[step].rows[:, None] + step)
    assert torch.equal(kept.values[:-1], torch.cat([each.values[:-1] for each in own]))


@pytest.mark.parametrize(("is_apart", "loaded_first"), [(False, [1, 2, 3]), (True, [2, 3, 3])])
def test_samples_that_lie_apart_are_fetched_one_batch_ahead(is_apart: bool, loaded_first: list[int]) -> None:
    drawn = [Batch(torch.tensor([i])) for i in range(3)]
    loaded: list[int] = []

    def load(batch: Batch) -> int:
        loaded.append(int(batch.rows))
        return loaded[-1]

    steps = [(int(batch.rows), sample, len(loaded)) for batch, sample in ahead(drawn, load, is_apart=is_apart)]
    assert steps == [(i, i, count) for i, count in enumerate(loaded_first)]
