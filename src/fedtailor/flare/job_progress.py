"""How far the job of a run is: what its server's half tells an administrator who asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

GREETING, TRAINING, FINISHING = "greeting sites", "training", "finishing"
CONNECTING, STARTING = "waiting for sites", "starting"  # before the server's half runs


@dataclass
class JobProgress:
    """The latest of a job. Numbers that are not known yet are 0, a metric is not a number."""

    stage: str
    round: int = 0
    rounds: int = 0
    metric: str = ""
    value: float = math.nan
    sites: int = 0  # that take part
    named: int = 0  # that were named
    exchanges: int = 0  # messages to each site, in this job
    seconds: float = 0.0  # since the job began to train
    first: int = 0  # rounds that were done before this job

    @property
    def left(self) -> float:
        """Seconds until the last round, judging by those so far; not a number before the first."""
        done = self.round - self.first
        return self.seconds / done * (self.rounds - self.round) if done > 0 else math.nan

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"value": None if math.isnan(self.value) else self.value}

    @staticmethod
    def read(told: Mapping[str, Any]) -> JobProgress:
        """From what a server of this or another version tells; unknown keys are dropped."""
        known = {f.name: told[f.name] for f in fields(JobProgress) if told.get(f.name) is not None}
        return JobProgress(**{"stage": TRAINING} | known)

    @property
    def words(self) -> str:
        parts = [self.stage]
        if self.rounds:
            parts.append(f"round {self.round}/{self.rounds}")
        if self.exchanges and self.rounds < 2:  # one long round, as of a fit; how many it needs is not known
            parts.append(f"{self.exchanges} exchanges")
        if not math.isnan(self.value):
            parts.append(f"val {self.metric} {self.value:.4f}")
        if self.named:
            parts.append(f"{self.sites} of {self.named} sites")
        if not math.isnan(self.left) and self.round < self.rounds:
            parts.append(f"{time_words(self.left)} left")
        return "  ".join(parts)


def time_words(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
