"""Settings one after the other, each suggested by Optuna (TPE) from how well those before it did on validation data.

Nothing of Optuna is kept: with the same seed and the same figures it suggests the same settings, so a search that was
interrupted asks again and finds the runs that it had already made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from fedtailor.core.random import stream
from fedtailor.errors import ConfigError
from fedtailor.experiments.sections import Range, SearchSection, Space

if TYPE_CHECKING:
    from fedtailor.studies.search import Subject, Trial, Tried


class Make(Protocol):
    """The runs of a setting of a subject."""

    def __call__(self, subject: Subject, settings: dict[str, Any]) -> Trial: ...


def require() -> None:
    """Raise a `ConfigError` when Optuna is not installed."""
    if find_spec("optuna") is None:
        raise ConfigError("search.sampler = \"optuna\": optuna is not installed; pip install 'fedtailor[search]'")


def run(
    section: SearchSection,
    subjects: Sequence[Subject],
    make: Make,
    attempt: Callable[[Sequence[Trial]], list[dict[str, Any]]],
) -> Tried:
    """What was tried of each subject. The nth trials of all run side by side; those of one subject do not."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    tried: Tried = {subject.label: [] for subject in subjects}
    searched = [subject for subject in subjects if subject.space]
    studies: dict[str, Any] = {s.label: _study(optuna, section, s.label) for s in searched}
    for _ in range(section.trials):
        suggested = [(s, studies[s.label].ask(_distributions(optuna, s.space))) for s in searched]
        trials = [make(s, {k: _rounded(v) for k, v in trial.params.items()}) for s, trial in suggested]
        for (s, trial), outcome in zip(suggested, attempt(trials), strict=True):
            tried[s.label].append(outcome)
            if "failed" in outcome:
                studies[s.label].tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                sign = 1 if outcome["higher_is_better"] else -1
                studies[s.label].tell(trial, sign * outcome["val"])
    return tried


def _study(optuna: Any, section: SearchSection, label: str) -> Any:
    seed = int(stream(section.all_seeds[0], "optuna", label).integers(2**31))
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(2, section.trials // 3))
    return optuna.create_study(direction="maximize", sampler=sampler)


def _distributions(optuna: Any, space: Space) -> dict[str, Any]:
    kinds, out = optuna.distributions, {}
    for key, values in space.items():
        if not isinstance(values, Range):
            out[key] = kinds.CategoricalDistribution(values)
        elif isinstance(values.low, int) and isinstance(values.high, int):
            out[key] = kinds.IntDistribution(values.low, values.high, log=values.log)
        else:
            out[key] = kinds.FloatDistribution(values.low, values.high, log=values.log)
    return out


def _rounded(value: Any) -> Any:
    """Four digits say enough of a number, and can be written into a paper."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
