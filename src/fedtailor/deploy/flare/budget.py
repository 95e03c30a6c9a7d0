"""How much may be asked of a site: what a server could add up from many small answers is kept small."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from fedtailor.core.data import FederatedData
from fedtailor.core.trees import Tree, tree_map
from fedtailor.deploy.flare.epsilon import SitePrivacy
from fedtailor.deploy.flare.refusal import Refused
from fedtailor.experiments.store import read_json, write_json

SPENT = "spent.json"
MINUTE = 60.0
EXACT = 15  # decimals


class Budget(BaseModel):
    """The table [policy.budget] of a site's own file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    evaluations_per_round: int = Field(default=6, ge=0, description="Times that metrics are told in one round.")
    evaluations_per_run: int = Field(
        default=0, ge=0, description="Times that metrics are told in one run. 0: twice its rounds, and 12."
    )
    calls_per_round: int = Field(default=400, ge=1, description="Calls of the algorithm's functions in one round.")
    requests_per_minute: int = Field(default=6000, ge=1, description="Requests of any kind within a minute.")
    decimals: int = Field(
        default=3, ge=0, le=EXACT, description=f"Decimals to which metrics are rounded; {EXACT}: not at all."
    )
    min_rows: int = Field(default=10, ge=1, description="Minimum rows behind a metric.")
    train_metrics: bool = Field(default=False, description="Whether metrics on training rows may be told.")
    refuse_imprints: bool = Field(
        default=True, description="Refuse models whose units are thresholds on one direction, which single rows out."
    )
    privacy: SitePrivacy = Field(default_factory=SitePrivacy, description="Noise on replies, and its own budget.")


class Spent:
    """What one run has used up. On disk, for a server that comes back may not ask anew."""

    def __init__(self, budget: Budget, folder: Path, rounds: int) -> None:
        self.budget = budget
        self.path = folder / SPENT
        self.most = budget.evaluations_per_run or 2 * rounds + 12
        saved: dict[str, Any] = read_json(self.path) if self.path.exists() else {}
        self.evaluations = {int(k): int(v) for k, v in saved.get("evaluations", {}).items()}  # by round
        self.calls = {int(k): int(v) for k, v in saved.get("calls", {}).items()}

    def save(self) -> None:
        """Whatever is asked next, this was answered."""
        write_json(self.path, {"evaluations": self.evaluations, "calls": self.calls})

    def evaluate(self, round: int) -> None:
        """One more evaluation, or a refusal."""
        count, total = self.evaluations.get(round, 0), sum(self.evaluations.values())
        if count >= self.budget.evaluations_per_round:
            raise Refused(f"metrics were told {count} times in round {round}, as often as the policy allows")
        if total >= self.most:
            raise Refused(f"metrics were told {total} times in this run, as often as the policy allows")
        self.evaluations[round] = count + 1
        self.save()

    def call(self, round: int) -> None:
        """One more call of the algorithm's functions, or a refusal."""
        count = self.calls.get(round, 0)
        if count >= self.budget.calls_per_round:
            raise Refused(f"{count} calls were answered in round {round}, as many as the policy allows")
        self.calls[round] = count + 1


def check_splits(budget: Budget, data: FederatedData, splits: Sequence[str]) -> None:
    """Whether numbers on these rows may leave; a split without rows has none to tell."""
    for split in splits:
        rows = len(getattr(data, split).x)
        if split == "train" and not budget.train_metrics:
            raise Refused("the policy does not let metrics on training rows out")
        if 0 < rows < budget.min_rows:
            raise Refused(f"{split} has fewer than the {budget.min_rows} rows that the policy wants behind a metric")


def rounded(budget: Budget, metrics: Tree) -> Tree:
    """Metrics as they may leave."""
    if budget.decimals == EXACT:
        return metrics
    return tree_map(lambda v: torch.round(v, decimals=budget.decimals) if v.is_floating_point() else v, metrics)


class Rate:
    """Requests of the last minute."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._times = deque[float]()

    def count(self) -> None:
        """One more, or a refusal."""
        now = time.monotonic()
        while self._times and now - self._times[0] > MINUTE:
            self._times.popleft()
        if len(self._times) >= self.most:
            raise Refused(f"more than {self.most} requests within a minute")
        self._times.append(now)
