"""Gaussian noise on what clients have changed: on every sum, or at a client on its own reply.

Neighbours are two federations, or two sets of rows at one client, of which one client's rows may all be replaced. A
change has norm `clip` at most, so two of them are at most 2 clip apart; `accountant` says what the noise is worth.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.aggregation import accountant
from fedtailor.aggregation.clip import Clip, changed_parts
from fedtailor.aggregation.shamir import Entropy
from fedtailor.core.algorithm import COUNT, Algorithm, client_functions, reply_example, reply_part
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Tree, items, leaves, rebuild, wide
from fedtailor.errors import ConfigError

FARTHEST = 2.0**61  # steps of the grid that a number may be from 0: with noise it is still a whole number of 64 bits


@dataclass(frozen=True)
class GaussianNoise:
    """Noise on every sum over the cohort. All clients count the same, and none is looked at alone."""

    multiplier: float  # standard deviation, as a multiple of clip
    clip: float
    is_repeatable: bool = False  # from the run's seed: then it is not private

    def __post_init__(self) -> None:
        if not self.clip:
            raise ConfigError("privacy.noise requires privacy.clip, which bounds the influence of one client")

    def add(self, fed: Federation, x: PerClient, total: Tree) -> Tree:
        """The sum of replies with noise on every number; refuses parts that are not clipped."""
        whole = None if x.call is None else changed_parts(x.example, x.call.args, x.call.placed)
        for path, _ in items(total, "/".join(map(str, x.path))):
            part = int(path.partition("/")[0]) if isinstance(x.example, tuple) else 0
            if x.call is None or whole is None or part not in whole:
                algorithm = fed.engine.experiment.algorithm
                name = "weights" if x.call is None else reply_part(algorithm, x.call.function, path).name
                raise ConfigError(
                    f'privacy.noise: {fed.title} sums "{name}", which is not a new version of what clients were '
                    "sent, so it cannot be clipped; choose one whose clients only send models, such as fedavg"
                )
        number = fed.sums.count_noisy(fed.round)
        if self.is_repeatable:
            rng = stream(fed.seed, fed.round, number, "noise")
            return add_repeatable_noise(total, self.multiplier * self.clip, rng)
        return add_noise(total, self.multiplier * self.clip, self.clip)

    def check(self, experiment: Any) -> None:
        accountant.require()
        if experiment.environment.missing == "stale":
            raise ConfigError('privacy.noise: not with environment.missing = "stale", which counts by sample counts')
        if experiment.model.has_common_statistics:
            raise ConfigError('privacy.noise: variances with noise may be negative; set model.buffers = "private"')


@dataclass(frozen=True)
class LocalNoise:
    """Clipping and noise, of standard deviation `noise` times `clip`, that a client adds to its own reply.

    Whoever sums it, in secret or in the open, sees no more than that. A change that is not finite becomes none.
    """

    clip: float
    noise: float

    def apply(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        which = changed_parts(reply, args, placed)
        parts = list(reply) if isinstance(reply, tuple) else [reply]
        if not all(bool(v.isfinite().all()) for i in which for v in leaves(parts[i])):
            parts = [args[which[i]] if i in which else part for i, part in enumerate(parts)]
        clipped = Clip(self.clip).apply(tuple(parts) if isinstance(reply, tuple) else parts[0], args, placed)
        parts = list(clipped) if isinstance(reply, tuple) else [clipped]
        noisy = add_noise({str(i): parts[i] for i in which}, self.noise * self.clip, self.clip)
        parts = [noisy[str(i)] if i in which else part for i, part in enumerate(parts)]
        return tuple(parts) if isinstance(reply, tuple) else parts[0]


def add_noise(tree: Tree, std: float, clip: float) -> Tree:
    """The tree with independent noise on every number, drawn from the operating system; nothing repeats it.

    Every number becomes a multiple of one grid, whatever the data: then the last bits of a floating-point number say
    nothing of what was there before (Mironov, CCS 2012). What rounding to the grid adds to the distance of two
    neighbours, which is 2 clip, the noise is larger by.
    """
    parts = leaves(tree)
    numbers = sum(v.numel() for v in parts)
    rounding = math.sqrt(numbers) * std / STEPS / (2 * clip)
    if rounding >= 1:
        raise ConfigError(f"privacy.noise = {std / clip:g}: too much for the grid of {numbers} numbers")
    grid = std / (1 - rounding) / STEPS
    flat = torch.cat([wide(v).flatten().cpu() for v in parts]).double().numpy() if numbers else np.zeros(0)
    whole = np.clip(np.rint(np.nan_to_num(flat) / grid), -FARTHEST, FARTHEST).astype(np.int64)
    noisy = torch.from_numpy((whole + discrete_gaussian(numbers)) * grid)
    each = zip(noisy.split([v.numel() for v in parts]), parts, strict=True)
    return rebuild(tree, (new.reshape(v.shape).to(v) for new, v in each))


def add_repeatable_noise(tree: Tree, std: float, rng: np.random.Generator) -> Tree:
    """The tree with Gaussian noise that can be drawn again, and taken away, by whoever has the seed: not private."""
    each = (wide(v) + torch.from_numpy(rng.normal(0.0, std, tuple(v.shape))).to(wide(v)) for v in leaves(tree))
    return rebuild(tree, (new.to(v.dtype) for new, v in zip(each, leaves(tree), strict=True)))


def exposed_part(
    algorithm: Algorithm, function: str, model: Model, args: tuple[Tree, ...], placed: tuple[bool, ...]
) -> str:
    """The name of a part of the reply that would leave without local noise; "" if there is none but sample counts."""
    sends = client_functions(algorithm)[function].sends  # type: ignore[attr-defined]
    covered = changed_parts(reply_example(algorithm, function, model), args, placed)
    each = enumerate(sends if isinstance(sends, tuple) else (sends,))
    return next((spec.name for i, spec in each if i not in covered and spec not in (None, COUNT)), "")


BITS = 24
STEPS = 2**BITS  # the standard deviation
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def discrete_gaussian(size: int, entropy: Entropy = os.urandom) -> Ints:
    """So many independent whole numbers of mean 0 and standard deviation `STEPS`, from the operating system.

    Canonne, Kamath, Steinke, NeurIPS 2020, Algorithms 2 and 3: a discrete Laplace distribution of scale t, thinned.
    Such noise costs no more than continuous noise of the same size (Proposition 5 there). Their algorithms are for
    rationals; here the standard deviation and t are one power of two, so that proposals are exact. Whether one is kept
    is decided by 53 random bits against an exponential in double precision: each number is within 2**-47 of the
    distribution in total variation.
    """
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
