"""Which clients are asked in a round: uniformly, by size, in turn, or as a function of the user's says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtailor.core.random import stream
from fedtailor.errors import ConfigError, RunError, nearest
from fedtailor.plugins import import_object


@dataclass(frozen=True)
class SamplingCandidates:
    """What a sampler knows; it returns the positions of `wanted` different clients."""

    round: int
    names: tuple[str, ...]
    wanted: int
    samples: np.ndarray  # training samples of each client, as reported when they joined
    random: np.random.Generator  # of this round: the same numbers if the run is resumed or repeated
    validation: Mapping[str, Sequence[float]]  # by metric, of each client in the last evaluation; empty before one


Sampler = Callable[[SamplingCandidates], Sequence[int]]


def uniform(among: SamplingCandidates) -> Sequence[int]:
    """All clients alike."""
    chosen: list[int] = among.random.choice(len(among.names), size=among.wanted, replace=False).tolist()
    return chosen


def by_size(among: SamplingCandidates) -> Sequence[int]:
    """One after the other, with probabilities proportional to numbers of samples."""
    with_samples = int((among.samples > 0).sum())
    if with_samples < among.wanted:
        raise RunError(f'federation.sampler = "size": only {with_samples} clients have samples, not {among.wanted}')
    share = among.samples / among.samples.sum()
    chosen: list[int] = among.random.choice(len(among.names), size=among.wanted, replace=False, p=share).tolist()
    return chosen


def in_turn(among: SamplingCandidates) -> Sequence[int]:
    """In the order of the clients' names, each round where the last one ended."""
    start = (among.round - 1) * among.wanted
    return [(start + i) % len(among.names) for i in range(among.wanted)]


SAMPLERS: dict[str, Sampler] = {"uniform": uniform, "size": by_size, "cycle": in_turn}


def find(name: str) -> Sampler:
    """By its name, or an own one as "module:function"."""
    if ":" not in name:
        if name not in SAMPLERS:
            hint = f'{nearest(name, SAMPLERS)}, or your own "module:function"'
            raise ConfigError(f'federation.sampler: no sampler "{name}"; {hint}', code="config.name")
        return SAMPLERS[name]
    own: Sampler = import_object("federation.sampler", name)
    try:
        inspect.signature(own).bind(None)
    except TypeError as error:
        called = f"{name.partition(':')[2]}(candidates)"
        raise ConfigError(
            f'federation.sampler: "{name}" is called as {called} and returns positions of clients; {error}'
        ) from None
    return own


def cohort(
    name: str,
    seed: int,
    round: int,
    wanted: int,
    names: Sequence[str],
    samples: np.ndarray,
    validation: Mapping[str, Sequence[float]],
) -> tuple[int, ...]:
    """The clients that are asked in a round, in order."""
    if wanted == len(names) or wanted == 0:
        return tuple(range(len(names)))
    random = stream(seed, round, "cohort")
    chosen = find(name)(SamplingCandidates(round, tuple(names), wanted, samples, random, validation))
    try:
        positions = sorted({int(c) for c in chosen})
    except (TypeError, ValueError):
        raise ConfigError(
            f'federation.sampler: "{name}" must return positions of clients; it gave {chosen!r}'
        ) from None
    if len(positions) != wanted or len(list(chosen)) != wanted or not 0 <= positions[0] <= positions[-1] < len(names):
        raise ConfigError(
            f'federation.sampler: "{name}" must return {wanted} different positions from 0 to {len(names) - 1}; '
            f"it gave {list(chosen)}"
        )
    return tuple(positions)
