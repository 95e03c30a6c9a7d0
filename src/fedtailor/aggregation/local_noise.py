"""Noise that a client adds to its own reply: whoever sums it, in secret or in the open, sees no more than that.

Neighbours are two sets of rows of the same number at one client: all of them may be replaced. A reply's change against
the message has norm `clip` at most, so two of them are at most 2 clip apart, as in `noise`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtailor.aggregation.noise import changed_parts, clipped, noisy
from fedtailor.core.algorithm import COUNT, Algorithm, client_functions, reply_example
from fedtailor.core.model import Model
from fedtailor.core.trees import Tree


@dataclass(frozen=True)
class LocalNoise:
    """Clipping and Gaussian noise, of standard deviation `noise` times `clip`, before a reply leaves."""

    clip: float
    noise: float

    def added(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        """The reply as it may leave; noise comes from the operating system, never from a run's seed."""
        reply = clipped(reply, args, placed, self.clip)
        parts, rng = list(reply) if isinstance(reply, tuple) else [reply], np.random.default_rng()
        for i in changed_parts(reply, args, placed):
            parts[i] = noisy(parts[i], self.noise * self.clip, rng)
        return tuple(parts) if isinstance(reply, tuple) else parts[0]


def exposed(algorithm: Algorithm, function: str, model: Model, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> str:
    """The name of a part of the reply that would leave without noise; "" if there is none. Sample counts are known."""
    sends = client_functions(algorithm)[function].sends  # type: ignore[attr-defined]
    covered = changed_parts(reply_example(algorithm, function, model), args, placed)
    each = enumerate(sends if isinstance(sends, tuple) else (sends,))
    return next((spec.name for i, spec in each if i not in covered and spec not in (None, COUNT)), "")
