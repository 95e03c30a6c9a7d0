"""What makes clients unequal beside their data: how much they work, and whether their replies arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedtailor.core.random import stream


@dataclass(frozen=True)
class Environment:
    """Of all clients of a run; an empty table means that they are alike. Every draw follows from the seed."""

    seed: int = 0
    epochs: tuple[int, ...] = ()  # passes over the data for each one that the algorithm asks for
    answer: tuple[float, ...] = ()  # probability that a reply arrives
    leave: float = 0.0  # probability, in every round, that a client leaves for good
    speed: tuple[float, ...] = ()  # samples per unit of time
    jitter: float = 0.0  # spread of the logarithm of the time a round takes
    deadline: float = 0.0  # replies after this time are missing; 0 is none
    missing: Literal["renormalise", "stale"] = "renormalise"  # whether a mean is over those who answered, or counts
    # those who did not with the model they were sent

    @property
    def fails(self) -> bool:
        """Whether a reply may be missing."""
        return bool(self.leave or self.deadline or any(p < 1 for p in self.answer))

    def passes(self, client: int, epochs: int) -> int:
        """Passes that a client makes when asked for `epochs`."""
        return epochs * self.epochs[client] if self.epochs else epochs

    def answers(self, round: int, exchange: int, clients: Sequence[int], samples: Sequence[int]) -> tuple[int, ...]:
        """Those of `clients`, who hold so many samples, whose replies arrive in an exchange of a round."""
        if not self.fails or not len(clients):
            return tuple(clients)
        last = max(clients) + 1
        rng = stream(self.seed, "environment", round, exchange)
        luck, delay = rng.random(last), np.exp(self.jitter * rng.standard_normal(last))
        out = []
        for client, n in zip(clients, samples, strict=True):
            arrives = not self.answer or luck[client] < self.answer[client]
            time = self.passes(client, n) / (self.speed[client] if self.speed else 1.0) * delay[client]
            if arrives and (not self.deadline or time <= self.deadline) and round <= self.departure(client):
                out.append(client)
        return tuple(out)

    def departure(self, client: int) -> float:
        """The last round that a client takes part in."""
        if not self.leave:
            return np.inf
        return float(stream(self.seed, "environment", "departure", client).geometric(self.leave)) - 1
