"""Callbacks follow a run from Python: when a round begins, when it has ended, and when the run has.

Give any object that has some of the three methods to `ft.run(callbacks=[...])`. What a callback raises interrupts the
run, which `fedtailor resume` goes on with; trackers never do that, and are a section of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import ConfigError
from fedtailor.experiments.config import RunConfig

METHODS = ("round_begins", "round_ends", "run_ends")


@dataclass(frozen=True)
class Followed:
    """The run that a callback follows."""

    path: Path
    config: RunConfig
    metric: str  # by which rounds are compared, on validation data
    higher_is_better: bool


class Callback:
    """What a callback may do; override what you need."""

    def round_begins(self, run: Followed, round: int) -> None:
        """Called before a round."""

    def round_ends(self, run: Followed, line: Mapping[str, Any], value: float) -> bool | None:
        """Called after a round with its record and the metric's mean over clients; True: this round is the last.

        `value` is NaN in rounds without evaluation.
        """

    def run_ends(self, run: Followed, results: Mapping[str, Any]) -> None:
        """Called at the end with the content of results.json."""


class OptunaPruning(Callback):
    """Report every evaluated round to a trial of Optuna, and stop when its pruner asks for it."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def round_ends(self, run: Followed, line: Mapping[str, Any], value: float) -> None:
        import optuna

        if math.isnan(value):
            return
        self.trial.report(value, line["round"])
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"{run.metric} {value:.4g} in round {line['round']}")


class Callbacks:
    def __init__(self, each: Sequence[Any], run: Followed) -> None:
        for one in each:
            if not any(callable(getattr(one, name, None)) for name in METHODS):
                raise ConfigError(f"callbacks: {type(one).__name__} has none of the methods {', '.join(METHODS)}")
        self._each, self._run = each, run

    def round_begins(self, round: int) -> None:
        for method in self._methods("round_begins"):
            method(self._run, round)

    def round_ends(self, line: Mapping[str, Any], value: float) -> bool:
        """Call all of them; whether one ends the run."""
        answers = [method(self._run, line, value) for method in self._methods("round_ends")]
        return any(answer is True for answer in answers)

    def run_ends(self, results: Mapping[str, Any]) -> None:
        for method in self._methods("run_ends"):
            method(self._run, results)

    def _methods(self, name: str) -> list[Callable[..., Any]]:
        return [getattr(one, name) for one in self._each if hasattr(one, name)]
