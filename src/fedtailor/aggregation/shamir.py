"""A secret in shares, of which any `threshold` give it back and fewer tell nothing. Shamir, CACM 1979."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**521 - 1
SHARE = 66  # bytes that hold a number below PRIME
Entropy = Callable[[int], bytes]  # so many random bytes


def split(secret: bytes, holders: Sequence[int], threshold: int, entropy: Entropy = os.urandom) -> dict[int, bytes]:
    """A share for each holder; holders are different numbers from 0 on."""
    value = int.from_bytes(secret, "little")
    if value >= PRIME:
        raise ValueError(f"a secret of {len(secret)} bytes is too long to be shared")
    if not 1 <= threshold <= len(set(holders)) == len(holders) or min(holders) < 0:
        raise ValueError(f"{threshold} of {len(holders)} shares: not a threshold for different holders")
    polynomial = [value, *(_below_prime(entropy) for _ in range(threshold - 1))]
    return {holder: _at(polynomial, holder + 1).to_bytes(SHARE, "little") for holder in holders}


def combine(shares: Mapping[int, bytes], length: int) -> bytes:
    """The secret of `length` bytes, from at least as many shares as the threshold."""
    points = {holder + 1: int.from_bytes(share, "little") for holder, share in shares.items()}
    value = sum(y * _lagrange(x, points) for x, y in points.items()) % PRIME
    if value >= 256**length:
        raise ValueError("the shares do not belong together")
    return value.to_bytes(length, "little")


def _below_prime(entropy: Entropy) -> int:
    """Any number below PRIME, each as likely: 521 random bits, drawn again in the one case that is too large."""
    while (value := int.from_bytes(entropy(SHARE), "little") & PRIME) == PRIME:
        pass
    return value


def _at(polynomial: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in reversed(polynomial):
        total = (total * x + coefficient) % PRIME
    return total


def _lagrange(x: int, points: Mapping[int, int]) -> int:
    """What the value at `x` counts for the value at 0."""
    top = bottom = 1
    for other in points:
        if other != x:
            top = top * other % PRIME
            bottom = bottom * (other - x) % PRIME
    return top * pow(bottom, -1, PRIME)
