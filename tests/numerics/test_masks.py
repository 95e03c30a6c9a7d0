"""Masks: which entries they take, where they stop, and that packed entries come back to their places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedtailor.core.trees import Params, Ragged, flat, unflat
from fedtailor.errors import ConfigError, RoundAbandoned
from fedtailor.numerics import masks
from tests.helpers import F64

PARAMS = {"b": torch.arange(4.0), "a.weight": torch.arange(6.0).reshape(2, 3), "a.scale": torch.tensor(9.0)}
NOTHING = {k: torch.zeros_like(v, dtype=torch.bool) for k, v in PARAMS.items()}
ALL = set(PARAMS)


def test_flat_and_back() -> None:
    assert flat(PARAMS).tolist() == [9, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3]  # a.scale, a.weight, b
    back = unflat(flat(PARAMS), PARAMS)
    assert all(torch.equal(back[k], v) for k, v in PARAMS.items())


def test_parts() -> None:
    found = masks.under(PARAMS, ["a"])
    assert {k: bool(v.all()) for k, v in found.items()} == {"b": False, "a.weight": True, "a.scale": True}
    assert not flat(masks.under(PARAMS, [])).any()
    with pytest.raises(ConfigError, match=r'algorithm\.layers.*"a\.wheight".*"a\.w'):
        masks.under(PARAMS, ["b", "a.wheight"])


def test_largest() -> None:
    score, eligible = torch.tensor([3.0, 9.0, 5.0, 5.0, 1.0]), torch.tensor([True, False, True, True, True])
    for count, wanted in enumerate([[], [2], [2, 3], [0, 2, 3], [0, 2, 3, 4], [0, 2, 3, 4]]):
        assert masks.largest(score, eligible, torch.tensor(count)).nonzero()[:, 0].tolist() == wanted


def sizes(mask: Params) -> dict[str, int]:
    return {k: int(m.sum()) for k, m in mask.items()}


def test_growth_over_the_whole_model() -> None:
    """Of 11 entries those with scores 9, 5, 4 at a rate of 1/4; then 3, 3 of 8; then one up to 6 of 11, and no more."""
    once = masks.grown(NOTHING, PARAMS, ALL, 0.25, 0.55, per_tensor=False, overshoot=False)
    assert once["a.scale"].item() is True
    assert once["a.weight"].tolist() == [[False, False, False], [False, True, True]]
    twice = masks.grown(once, PARAMS, ALL, 0.25, 0.55, per_tensor=False, overshoot=False)
    assert sizes(twice) == {"b": 1, "a.weight": 3, "a.scale": 1}
    third = masks.grown(twice, PARAMS, ALL, 0.25, 0.55, per_tensor=False, overshoot=False)
    assert sum(sizes(third).values()) == 6  # round(6.05)
    assert sizes(masks.grown(third, PARAMS, ALL, 0.25, 0.55, per_tensor=False, overshoot=False)) == sizes(third)


def test_growth_within_each_tensor() -> None:
    found = masks.grown(NOTHING, PARAMS, {"b", "a.weight"}, 0.5, 0.4, per_tensor=True, overshoot=False)
    assert found["b"].tolist() == [False, False, True, True]
    assert sizes(found) == {"b": 2, "a.weight": 2, "a.scale": 0}  # round(1.6), round(2.4)


@pytest.mark.parametrize(("limit", "end"), [(0.05, 0.25), (0.3, 0.4375), (0.5, 0.578125), (0.8, 0.8220)])
def test_overshooting_ends_where_the_released_code_does(limit: float, end: float) -> None:
    mask, score = {"w": torch.zeros(4096, dtype=torch.bool)}, {"w": torch.arange(4096.0)}
    for _ in range(20):
        mask = masks.grown(mask, score, {"w"}, 0.25, limit, per_tensor=True, overshoot=True)
    assert float(mask["w"].double().mean()) == pytest.approx(end, abs=1e-3)


@given(st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(0, 99))
def test_masks_only_grow_and_end_at_the_limit(n: int, rate: float, limit: float, per_tensor: bool, seed: int) -> None:
    score = {"w": torch.rand(n, generator=torch.Generator().manual_seed(seed))}
    mask = {"w": torch.zeros(n, dtype=torch.bool)}
    for _ in range(6):
        wider = masks.grown(mask, score, {"w"}, rate, limit, per_tensor, overshoot=False)
        assert not (mask["w"] & ~wider["w"]).any()
        assert int(wider["w"].sum()) <= round(limit * n)
        mask = wider
    if rate == 1:
        assert int(mask["w"].sum()) == round(limit * n)


def test_normalised_by_tensor() -> None:
    change = {"large": torch.tensor([10.0, 30.0, 1000.0]), "small": torch.tensor([0.1, 0.1]), "dead": torch.zeros(2)}
    mask = {"large": torch.tensor([False, False, True])} | {k: torch.zeros(2).bool() for k in ("small", "dead")}
    found = masks.normalised(change, mask)
    torch.testing.assert_close(found["large"][:2], torch.tensor([0.5, 1.5]))
    torch.testing.assert_close(found["small"], torch.ones(2))
    assert found["dead"].tolist() == [0, 0]


def test_mean_over_the_clients_that_share() -> None:
    keep = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0]]).bool()
    values = torch.tensor([[1.0, 2, 99, 99], [99, 4, 5, 99], [3, 9, 99, 99]], dtype=F64)
    weight, otherwise = torch.tensor([1.0, 2, 3], dtype=F64), torch.tensor([-1.0, -2, -3, -4], dtype=F64)
    packed = masks.pack(values, keep)
    found = masks.mean_over_sharers(packed, keep, weight, otherwise)
    torch.testing.assert_close(found, torch.tensor([10 / 4, 37 / 6, 5, -4], dtype=F64))
    with pytest.raises(RoundAbandoned, match="mask"):
        masks.mean_over_sharers(Ragged((packed[0], packed[1] + 1)), keep, weight, otherwise)


def test_overlap() -> None:
    stack = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()
    wanted = torch.tensor([[1, 1 / 3, 0, 0], [1 / 3, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=F64)
    torch.testing.assert_close(masks.overlap(stack), wanted)


@st.composite
def kept(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    clients, n = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    bits = draw(st.lists(st.booleans(), min_size=clients * n, max_size=clients * n))
    return torch.arange(1.0, clients * n + 1).reshape(clients, n), torch.tensor(bits).reshape(clients, n)


@given(kept())
def test_packing(case: tuple[Tensor, Tensor]) -> None:
    values, keep = case
    packed, length = masks.pack(values, keep)
    for row, own, front, n in zip(values, keep, packed, length, strict=True):
        assert front.tolist() == row[own].tolist() + [0] * (len(row) - int(n))
    assert torch.equal(masks.unpack(Ragged((packed, length)), keep), values * keep)
    stacked = torch.func.vmap(lambda v, k: tuple(masks.pack(v, k)))(values, keep)
    assert torch.equal(stacked[0], packed)
    assert torch.equal(stacked[1], length)
    for found, wanted in zip(
        masks.pack_each(values[0], keep), masks.pack(values[:1].expand_as(keep), keep), strict=True
    ):
        assert torch.equal(found, wanted)


@given(kept())
def test_bits(case: tuple[Tensor, Tensor]) -> None:
    _, mask = case
    bits = masks.to_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.shape == (len(mask), -(-mask.shape[1] // 8))
    assert torch.equal(masks.from_bits(bits, mask.shape[1]), mask)


def test_a_mask_is_told_only_when_it_changed() -> None:
    wider = NOTHING | {"b": torch.tensor([True, False, False, True])}
    assert masks.news_of(NOTHING, NOTHING)[1].item() == 0
    bits, length = masks.news_of(wider, NOTHING)
    assert length.item() == 2
    old = masks.to_bits(flat(NOTHING))
    stack = Ragged((torch.stack([bits, torch.zeros_like(bits)]), torch.tensor([2, 0])))
    new = masks.from_bits(masks.heard(stack, torch.stack([old, bits])), 11)
    assert torch.equal(new[0], flat(wider))
    assert torch.equal(new[1], flat(wider))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    values = torch.tensor([3.0, -0.0, 0.0, -2.5, 3.0, 1e-40, -1e-40, 7.0, -torch.inf, 0.0], dtype=dtype)
    for score in (values, -values, torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=dtype)):
        order = score.argsort(descending=True, stable=True)
        for count in (0, 1, 2, 4, 7, len(score)):
            wanted = torch.zeros(len(score), dtype=torch.bool)
            wanted[order[:count]] = True
            assert torch.equal(masks.largest(score, torch.ones_like(wanted), torch.tensor(count)), wanted)
