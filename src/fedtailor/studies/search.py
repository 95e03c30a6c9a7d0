"""Hyper-parameters found on validation data, with the same budget for every algorithm, before anything is compared.

A search run is a run as any other, with a seed of its own. Of what it leaves only the validation figures of
its rounds are read, never its results on test data.

With `sampler = "optuna"` settings come one after the other. Nothing of Optuna is kept: with the same seed and the same
figures it suggests the same settings, so an interrupted search asks again and finds the runs that it had already made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor import algorithms
from fedtailor.core.random import stream
from fedtailor.core.task import recorded_metrics
from fedtailor.data import has_validation
from fedtailor.errors import ClientError, ConfigError, RunError, nearest
from fedtailor.experiments.config import RunConfig, parse, with_values
from fedtailor.experiments.sections import Range, SearchSection, Space
from fedtailor.experiments.store import RunFolder, read_json, write_json
from fedtailor.metrics.summary import summarise
from fedtailor.studies.grid import Cell, CellListener, Failed, folder_name, refuse_failed, try_cells

SEARCH, FOUND = "search", "search.json"

Settings = dict[str, Any]  # by keys such as "local.lr"


@dataclass(frozen=True)
class Subject:
    """What settings are searched for: an algorithm of a comparison, or a cell of a published table."""

    label: str
    tables: dict[str, Any]  # the configuration of its runs
    space: Space


@dataclass(frozen=True)
class Trial:
    """A setting, and the runs that try it."""

    settings: Settings
    cells: tuple[Cell, ...]  # one for each seed of the search


@dataclass(frozen=True)
class Plan:
    """What a search has to do; checked before the first run."""

    section: SearchSection
    subjects: Sequence[Subject]
    folder: Path
    trials: dict[str, list[Trial]]  # by the label of the subject, as far as they are known beforehand


Tried = dict[str, list[dict[str, Any]]]  # what is recorded of the trials, by the label of the subject


def check_names(section: SearchSection, known: Collection[str]) -> None:
    """Refuse values for an algorithm that is not there."""
    for name in section.algorithms:
        if name not in known:
            raise ConfigError(f'search.algorithms: no algorithm "{name}" here; {nearest(name, known)}')


def space_of(section: SearchSection, *names: str) -> Space:
    """The values to try of an algorithm that goes by these names; a key without a dot is an option of its own."""
    own = {key: values for name in names for key, values in section.algorithms.get(name, {}).items()}
    return section.space | {key if "." in key else f"algorithm.{key}": values for key, values in own.items()}


def plan(section: SearchSection, subjects: Sequence[Subject], seeds: Collection[int], folder: Path) -> Plan:
    """The runs of a search; all that can be is checked before the first one runs."""
    for seed in section.all_seeds:
        if seed in seeds:
            raise ConfigError(f"search.seed = {seed}: is one of the seeds that are compared; choose another")
    if not any(subject.space for subject in subjects):
        raise ConfigError('search.space: nothing to try; list values, such as "local.lr" = [0.01, 0.1]')
    for key, values in ((key, values) for subject in subjects for key, values in subject.space.items()):
        if key.split(".")[0] not in ("algorithm", "local", "model", "server") or key == "algorithm.name":
            raise ConfigError(f'search: "{key}" cannot be searched; keys of algorithm, local, model and server can')
        if isinstance(values, Range) and section.sampler == "grid":
            raise ConfigError(f'search: {key}: a range of numbers needs search.sampler = "optuna"')
    if section.sampler == "optuna":
        require_optuna()
        for subject in subjects:  # the ends of ranges stand for what will be suggested
            trial_of(section, subject, {k: first(v) for k, v in subject.space.items()}, folder)
        return Plan(section, subjects, folder, {})
    trials = {s.label: [trial_of(section, s, settings, folder) for settings in drawn(section, s)] for s in subjects}
    return Plan(section, subjects, folder, trials)


def first(values: list[Any] | Range) -> Any:
    return values.low if isinstance(values, Range) else values[0]


def drawn(section: SearchSection, subject: Subject) -> list[Settings]:
    """All combinations of a subject's values or, if these are too many, some drawn by seed and name."""
    listed = {key: values for key, values in subject.space.items() if isinstance(values, list)}
    for key, values in listed.items():
        if len({folder_name(str(value), 0) for value in values}) < len(values):
            raise ConfigError(f"search: {key} = {values}: two of them are the same")
    if not subject.space:
        return []
    sizes = [len(values) for values in listed.values()]
    total = math.prod(sizes)
    picked = np.arange(total)
    if total > section.trials:
        picked = np.sort(stream(section.seed, SEARCH, subject.label).choice(total, section.trials, replace=False))
    places = zip(*np.unravel_index(picked, sizes), strict=True)
    return [{k: v[i] for (k, v), i in zip(listed.items(), place, strict=True)} for place in places]


def trial_of(section: SearchSection, subject: Subject, settings: Settings, folder: Path) -> Trial:
    return Trial(settings, tuple(_cell(section, subject, settings, folder, seed) for seed in section.all_seeds))


def _cell(section: SearchSection, subject: Subject, settings: Settings, folder: Path, seed: int) -> Cell:
    rounds = {"rounds": section.rounds} if section.rounds else {}
    fixed = {"seed": seed, "evaluation.test_curve": False} | rounds
    config: RunConfig = parse(with_values(subject.tables, settings | fixed), origin=f"search, {subject.label}")
    algorithms.make(config.algorithm.name, config.algorithm.options)
    if not has_validation(config.data):
        hint = "set data.val above 0" if hasattr(config.data, "val") else "use another source"
        raise ConfigError(f"data: a search needs validation samples, and {config.data.source} has none; {hint}")
    name = folder_name(f"{subject.label} {settings_text(settings)}", seed)
    return Cell(subject.label, seed, folder / SEARCH / name, config)


def settings_text(settings: Settings) -> str:
    return ", ".join(f"{key.removeprefix('algorithm.')} {value}" for key, value in settings.items())


def run(plan: Plan, workers: int, data_root: Path | None, listener: CellListener) -> dict[str, Settings]:
    """Run what is missing of a search and record it; returns the best settings by label."""
    section, folder = plan.section, plan.folder

    def listen(cell: str, round: int, rounds: int) -> None:
        listener(f"{SEARCH}/{cell}", round, rounds)

    def attempt(trials: Sequence[Trial]) -> list[dict[str, Any]]:
        cells = [cell for trial in trials for cell in trial.cells]
        failed = try_cells(cells, workers, data_root, listen)
        refuse_failed({k: e for k, e in failed.items() if not isinstance(e, RunError | ClientError)}, len(cells))
        return [_outcome(trial, failed) for trial in trials]

    with RunFolder(folder / SEARCH).locked():  # or a run that another process works on would count as failed
        if section.sampler == "optuna":
            make = partial(trial_of, section, folder=folder)
            tried = run_suggested(section, plan.subjects, make, attempt)
        else:
            outcomes = iter(attempt([trial for group in plan.trials.values() for trial in group]))
            tried = {label: [next(outcomes) for _ in group] for label, group in plan.trials.items()}
    best = {label: _best(outcomes) for label, outcomes in tried.items()}
    recorded = {label: {"settings": best[label], "tried": tried[label]} for label in best}
    write_json(folder / FOUND, section.model_dump() | {"found": recorded})
    for label, settings in best.items():
        if settings is None:
            why = tried[label][0]["failed"]
            raise RunError(f"search: every setting of {label} failed, try other values; the first: {why}")
    return {label: settings for label, settings in best.items() if settings is not None}


def folders(plan: Plan, label: str) -> list[Path]:
    """Where the search runs of a subject are, as far as they are known: planned, or recorded by an earlier search."""
    known = [trial.settings for trial in plan.trials.get(label, [])]
    if (plan.folder / FOUND).exists():
        known += [
            tried["settings"] for tried in read_json(plan.folder / FOUND)["found"].get(label, {}).get("tried", [])
        ]
    names = (folder_name(f"{label} {settings_text(one)}", seed) for one in known for seed in plan.section.all_seeds)
    return [plan.folder / SEARCH / name for name in names]


def _outcome(trial: Trial, failed: Failed) -> dict[str, Any]:
    """What is recorded of a trial: the mean over seeds of how well the round does that each run selects."""
    each = [_of_run(cell, failed) for cell in trial.cells]
    out: dict[str, Any] = {"settings": trial.settings, "run": f"{SEARCH}/{trial.cells[0].folder.name}"}
    for figures in each:
        if "failed" in figures:
            return out | figures
    if len(each) == 1:
        return out | each[0]
    by_seed = {str(cell.seed): figures["val"] for cell, figures in zip(trial.cells, each, strict=True)}
    together = {"val": float(np.mean(list(by_seed.values()))), "clients": min(f["clients"] for f in each)}
    return out | {k: each[0][k] for k in ("metric", "higher_is_better")} | together | {"by_seed": by_seed}


def _of_run(cell: Cell, failed: Failed) -> dict[str, Any]:
    """How well a run does on validation data in the round that it selects, or why there is none."""
    if cell.folder.name in failed:
        return {"failed": str(failed[cell.folder.name])}
    ran = RunFolder(cell.folder)
    metric, higher = next(iter(recorded_metrics(ran.about).items()))
    lines = [line for line in ran.metrics() if "val" in line]
    rounds = {line["round"]: summarise(line["val"][metric], higher_is_better=higher) for line in lines}
    rounds = {round: summary for round, summary in rounds.items() if math.isfinite(summary.mean)}
    if not rounds:
        return {"failed": f"{metric} on validation data is not finite in any round"}
    best = max(rounds, key=lambda r: rounds[r].mean if higher else -rounds[r].mean)
    figures = {"metric": metric, "higher_is_better": higher, "val": rounds[best].mean}
    return figures | {"clients": rounds[best].clients, "round": best}


def _best(outcomes: list[dict[str, Any]]) -> Settings | None:
    """The best of what was tried, none if all failed; without anything to try there is nothing to change."""
    if not outcomes:
        return {}
    fine = [o for o in outcomes if "failed" not in o]
    # a client whose figure is not a number is not in the mean: a setting that loses none comes first
    best = max(fine, key=lambda o: (o["clients"], o["val"] if o["higher_is_better"] else -o["val"]), default=None)
    return None if best is None else best["settings"]


def notes(folder: Path) -> list[str]:
    """Lines that stand below a table: how its settings were found, and which they are; none without a search."""
    if not (folder / FOUND).exists():
        return []
    record = read_json(folder / FOUND)
    rounds = f" of {record['rounds']} rounds" if record["rounds"] else ""
    seeds = record.get("seeds") or [record["seed"]]
    seeds_text = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    by = ", by Optuna (TPE)" if record.get("sampler") == "optuna" else ""
    how = f"{record['trials']} trials{rounds} each{by}, {seeds_text}; {FOUND} has all of them."
    lines = ["", f"Settings were found by search on validation data: {how}", ""]
    for label, entry in record["found"].items():
        tried, failed = len(entry["tried"]), sum("failed" in t for t in entry["tried"])
        short = [f"tried {tried} of {record['trials']}"] if tried < record["trials"] else []
        short += [f"{failed} failed"] if failed else []
        text = settings_text(entry["settings"]) + (f" ({', '.join(short)})" if short else "")
        lines.append(f"- {label}: {text if tried else 'nothing to search'}")
    return lines


def require_optuna() -> None:
    """Raise a `ConfigError` when Optuna is not installed."""
    if find_spec("optuna") is None:
        raise ConfigError("search.sampler = \"optuna\": optuna is not installed; pip install 'fedtailor[search]'")


def run_suggested(
    section: SearchSection,
    subjects: Sequence[Subject],
    make: Callable[[Subject, Settings], Trial],
    attempt: Callable[[Sequence[Trial]], list[dict[str, Any]]],
) -> Tried:
    """What was tried of each subject, by settings that Optuna (TPE) suggests from earlier validation figures.

    The nth trials of all subjects run side by side; those of one subject do not.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    tried: Tried = {subject.label: [] for subject in subjects}
    searched = [subject for subject in subjects if subject.space]
    studies: dict[str, Any] = {s.label: _optuna_study(optuna, section, s.label) for s in searched}
    for _ in range(section.trials):
        suggested = [(s, studies[s.label].ask(_distributions(optuna, s.space))) for s in searched]
        trials = [make(s, {k: _four_digits(v) for k, v in trial.params.items()}) for s, trial in suggested]
        for (s, trial), outcome in zip(suggested, attempt(trials), strict=True):
            tried[s.label].append(outcome)
            if "failed" in outcome:
                studies[s.label].tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                sign = 1 if outcome["higher_is_better"] else -1
                studies[s.label].tell(trial, sign * outcome["val"])
    return tried


def _optuna_study(optuna: Any, section: SearchSection, label: str) -> Any:
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


def _four_digits(value: Any) -> Any:
    """Four digits say enough of a number, and can be written into a paper."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
