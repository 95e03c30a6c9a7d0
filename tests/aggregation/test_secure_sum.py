"""The masks of a secure sum: they cancel, they hide, and they can be taken away when clients are lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.aggregation import secure_sum, shamir
from fedtailor.aggregation.secure_sum import Words
from fedtailor.aggregation.shamir import PRIME, Entropy
from fedtailor.core.random import stream

CONTEXT = b"a sum"


def entropy(*key: str | int) -> Entropy:
    return stream("entropy", *key).bytes


def words(*key: str | int, length: int = 5) -> Words:
    return stream("words", *key).integers(0, 2**64, size=length, dtype=np.uint64)


def protocol(
    values: dict[int, Words],
    threshold: int,
    *,
    before_dealing: Sequence[int] = (),
    before_masking: Sequence[int] = (),
    before_revealing: Sequence[int] = (),
    randomness: str = "one",
) -> tuple[dict[int, Words], Words]:
    """A whole sum, in which clients are lost; the masked vectors that the server got, and what it opened."""
    first = {c: secure_sum.advertise(entropy(randomness, c, "keys")) for c in values}
    adverts = {c: advert for c, (_, advert) in first.items()}
    second = {
        c: secure_sum.deal(keys, c, adverts, threshold, CONTEXT, entropy(randomness, c, "deal"))
        for c, (keys, _) in first.items()
        if c not in before_dealing
    }
    third = {
        c: secure_sum.mask(dealt, {o: boxes[c] for o, (_, boxes) in second.items() if o != c}, values[c])
        for c, (dealt, _) in second.items()
        if c not in before_masking
    }
    vectors = {c: vector for c, (_, vector) in third.items()}
    revealed = {c: secure_sum.reveal(masked, vectors) for c, (masked, _) in third.items() if c not in before_revealing}
    return vectors, secure_sum.open_sum(adverts, second, vectors, revealed, threshold, CONTEXT)


@given(st.data())
@settings(max_examples=30)
def test_the_sum_is_exact_whoever_is_lost(data: st.DataObject) -> None:
    clients = data.draw(st.lists(st.integers(0, 1000), min_size=2, max_size=6, unique=True))
    threshold = data.draw(st.integers(secure_sum.least(len(clients)), len(clients)))
    order = data.draw(st.permutations(clients))
    a, b, c = sorted(data.draw(st.lists(st.integers(0, len(clients) - threshold), min_size=3, max_size=3)))
    values = {client: words("values", client) for client in clients}
    _, found = protocol(
        values, threshold, before_dealing=order[:a], before_masking=order[a:b], before_revealing=order[b:c]
    )
    there = [v for client, v in values.items() if client not in order[:b]]
    assert found.tolist() == [sum(int(v[i]) for v in there) % 2**64 for i in range(5)]


def test_fewer_than_the_threshold_open_nothing() -> None:
    values = {c: words(c) for c in range(4)}
    with pytest.raises(ValueError, match="2 vectors arrived, 3 needed"):
        protocol(values, 3, before_masking=[0, 1])
    with pytest.raises(ValueError, match=r"\b4\b.*\b2\b.*\b3\b"):
        protocol(values, 3, before_revealing=[0, 1])
    with pytest.raises(ValueError, match=r"2 of 4 .* 3 "):
        protocol(values, 2)


def test_masked_vectors_look_uniform_and_depend_on_the_keys_alone() -> None:
    values = {c: np.full(20_000, 3 + c, dtype=np.uint64) for c in range(4)}
    vectors, total = protocol(values, 3)
    others, same_total = protocol(values, 3, randomness="two")
    assert (total == 18).all()
    assert (same_total == total).all()
    for c in values:
        assert not (vectors[c] == others[c]).any()
        assert not np.isin(vectors[c], values[c]).any()
        share = vectors[c] / 2.0**64
        assert abs(share.mean() - 0.5) < 4 * (1 / 12 / 20_000) ** 0.5
        counts = np.bincount(vectors[c].view(np.uint8), minlength=256)  # 160 000 bytes
        assert ((counts - 625.0) ** 2 / 625.0).sum() < 350  # chi squared with 255 degrees of freedom: 3.1 in 100 000
        assert abs(np.corrcoef(share, vectors[(c + 1) % 4] / 2.0**64)[0, 1]) < 4 / 20_000**0.5


def test_one_client_cannot_open_what_another_dealt() -> None:
    first = {c: secure_sum.advertise(entropy(c)) for c in range(3)}
    adverts = {c: advert for c, (_, advert) in first.items()}
    dealt, boxes = zip(
        *(secure_sum.deal(keys, c, adverts, 2, CONTEXT, entropy(c, "deal")) for c, (keys, _) in first.items()),
        strict=True,
    )
    with pytest.raises(ValueError, match="share of client 1 "):
        secure_sum.mask(dealt[0], {1: boxes[1][2]}, words("any"))
    spoilt = bytes([boxes[1][0][0] ^ 1]) + boxes[1][0][1:]
    with pytest.raises(ValueError, match="share of client 1 "):
        secure_sum.mask(dealt[0], {1: spoilt}, words("any"))


def test_of_each_client_one_secret_is_revealed_never_both() -> None:
    shares = {c: bytes([c]) * 66 + bytes([10 + c]) * 66 for c in range(3)}
    masked = secure_sum.Masked(0, 2, shares)
    assert secure_sum.reveal(masked, [0, 1]) == {0: bytes(66), 1: b"\x01" * 66, 2: b"\x0c" * 66}
    for survivors in ([1, 2], [0], [0, 7]):
        with pytest.raises(ValueError, match="vectors arrived"):
            secure_sum.reveal(masked, survivors)


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), st.integers(8, 40))
def test_fixed_point_sums_have_the_stated_precision(numbers: list[float], bits: int) -> None:
    total = secure_sum.add_modulo(secure_sum.encode_fixed_point(np.array([v]), bits, 4) for v in numbers)
    assert abs(secure_sum.decode_fixed_point(total, bits)[0] - sum(numbers)) <= 4 * 2.0 ** -(bits + 1) + 1e-9


def test_a_number_out_of_range_is_named() -> None:
    assert secure_sum.largest(32, 4) == 2**29
    assert secure_sum.decode_fixed_point(
        secure_sum.encode_fixed_point(np.array([-(2.0**29) + 1, 0.25]), 32, 4), 32
    ).tolist() == [
        -(2.0**29) + 1,
        0.25,
    ]
    for wrong in (2.0**29, -(2.0**29), np.inf, np.nan):
        with pytest.raises(ValueError, match=r"is not within ±5\.36871e"):
            secure_sum.encode_fixed_point(np.array([1.0, wrong, 2.0]), 32, 4)


@given(st.binary(min_size=1, max_size=65), st.data())
def test_any_threshold_of_shares_gives_the_secret(secret: bytes, data: st.DataObject) -> None:
    holders = data.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=8, unique=True))
    threshold = data.draw(st.integers(1, len(holders)))
    shares = shamir.split(secret, holders, threshold, entropy("shamir"))
    some = data.draw(st.permutations(holders))[: data.draw(st.integers(threshold, len(holders)))]
    assert shamir.combine({h: shares[h] for h in some}, len(secret)) == secret


def test_fewer_shares_fit_every_secret() -> None:
    shares = shamir.split(b"secret", range(5), 3, entropy("fewer"))
    two = {h: shares[h] for h in (0, 3)}
    for guess in (b"secret", b"public"):  # a third point makes either of them the value at 0
        value = int.from_bytes(guess, "little")
        x, y = zip(*((h + 1, int.from_bytes(s, "little")) for h, s in two.items()), strict=True)
        at_5 = _through({0: value, x[0]: y[0], x[1]: y[1]}, 5)
        assert shamir.combine(two | {4: at_5.to_bytes(66, "little")}, 6) == guess


def test_wrong_thresholds_and_secrets_are_refused() -> None:
    with pytest.raises(ValueError, match="4 of 3 shares"):
        shamir.split(b"s", range(3), 4)
    with pytest.raises(ValueError, match="2 of 2 shares"):
        shamir.split(b"s", [1, 1], 2)
    with pytest.raises(ValueError, match="a secret of 66 bytes is too long"):
        shamir.split(b"\xff" * 66, range(3), 2)
    mixed = {0: shamir.split(b"a" * 32, range(2), 2)[0], 1: shamir.split(b"b" * 32, range(2), 2)[1]}
    with pytest.raises(ValueError, match="do not belong together"):
        shamir.combine(mixed, 32)


def _through(points: dict[int, int], x: int) -> int:
    """The value at `x` of the polynomial through points, by Lagrange's formula written out."""
    total = 0
    for a, value in points.items():
        term = value
        for b in points:
            if b != a:
                term = term * (x - b) * pow(a - b, -1, PRIME) % PRIME
        total += term
    return total % PRIME
