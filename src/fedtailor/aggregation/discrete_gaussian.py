"""Whole numbers with a discrete Gaussian distribution, from the operating system's cryptographic generator.

Canonne, Kamath, Steinke, NeurIPS 2020, Algorithms 2 and 3: a discrete Laplace distribution of scale t, thinned. Such
noise costs no more than continuous noise of the same size (Proposition 5 there). Their algorithms are for rationals;
here the standard deviation and t are one power of two, so that proposals are exact. Whether one is kept is decided by
53 random bits against an exponential in double precision: each number is within 2**-47 of the distribution in total
variation.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from fedtailor.aggregation.shamir import Entropy

BITS = 24
STEPS = 2**BITS  # the standard deviation
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def discrete_gaussian(size: int, entropy: Entropy = os.urandom) -> Ints:
    """So many independent whole numbers of mean 0 and standard deviation `STEPS`."""
    parts, missing = list[Ints](), size
    while missing > 0:
        parts.append(_proposals(int(1.8 * missing) + 64, entropy)[:missing])
        missing -= len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _proposals(count: int, entropy: Entropy) -> Ints:
    words = np.frombuffer(entropy(8 * count), dtype="<u8")
    low = (words & np.uint64(STEPS - 1)).astype(np.int64)  # of the magnitude, in steps below t
    is_minus = (words >> np.uint64(BITS) & np.uint64(1)).astype(bool)
    kept = _uniform(count, entropy) < np.exp(-low / STEPS)
    low, is_minus = low[kept], is_minus[kept]
    high = np.floor(-np.log(_uniform(len(low), entropy))).astype(np.int64)  # how often exp(-1) says yes in a row
    magnitude = low + high * STEPS
    chance = np.exp(-(((magnitude - STEPS) / STEPS) ** 2) / 2)
    kept = (_uniform(len(low), entropy) < chance) & ~(is_minus & (magnitude == 0))
    return np.where(is_minus, -magnitude, magnitude)[kept]


def _uniform(count: int, entropy: Entropy) -> Floats:
    """Numbers in (0, 1), each of 53 random bits."""
    words = np.frombuffer(entropy(8 * count), dtype="<u8") >> np.uint64(11)
    return (words.astype(np.float64) + 0.5) * 2.0**-53
