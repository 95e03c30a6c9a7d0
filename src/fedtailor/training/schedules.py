"""The step size over the rounds of a run, or over the steps of a training, as a factor of `local.lr`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "cosine", "linear", "step"]


@dataclass(frozen=True)
class Schedule:
    """Grows over `warmup`, then falls to `last` of its height; `step` multiplies by `decay` every so often."""

    name: ScheduleName = "constant"
    over: Literal["rounds", "steps"] = "rounds"
    length: int = 0  # rounds of the run; steps of a training are counted when it begins
    warmup: int = 0
    last: float = 0.0
    decay: float = 0.1
    every: int = 0

    @property
    def is_constant(self) -> bool:
        return self.name == "constant" and not self.warmup

    def in_round(self, round: int) -> float:
        """In a round of the run, the first is 1; before that, where something is prepared, as in the first."""
        return self.factor(max(round - 1, 0), self.length) if self.over == "rounds" else 1.0

    def in_step(self, step: int, steps: int) -> float:
        """In a step of a training, the first is 0."""
        return self.factor(step, steps) if self.over == "steps" else 1.0

    def factor(self, at: int, length: int) -> float:
        """At place `at` of 0 .. length - 1."""
        if at < self.warmup:
            return (at + 1) / self.warmup
        if self.name == "step":
            return float(self.decay ** ((at - self.warmup) // self.every))
        done = min((at - self.warmup) / max(length - self.warmup - 1, 1), 1.0)
        if self.name == "cosine":
            return self.last + (1 - self.last) * (1 + math.cos(math.pi * done)) / 2
        return 1 - (1 - self.last) * done if self.name == "linear" else 1.0
