"""Hyper-parameters found on validation data, with the same budget for every algorithm, before anything is compared.

A search run is a run as any other, with a seed of its own. Of what it leaves only the validation figures of
its rounds are read, never its results on test data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor import algorithms
from fedtailor.core.metric import recorded_metrics
from fedtailor.core.random import stream
from fedtailor.data import has_validation
from fedtailor.errors import ClientError, ConfigError, RunError, nearest
from fedtailor.experiments.config import RunConfig, parse, with_values
from fedtailor.experiments.store import RunFolder, read_json, write_json
from fedtailor.experiments.study_sections import SearchSection, Space
from fedtailor.metrics.summary import summarise
from fedtailor.studies.grid import Cell, Failed, Told, folder_name, refuse_failed, try_cells

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
    """A setting, and the run that tries it."""

    settings: Settings
    cell: Cell


Trials = dict[str, list[Trial]]  # by the label of the subject; none for one that has nothing to search


def check_names(section: SearchSection, known: Collection[str]) -> None:
    """Refuse values for an algorithm that is not there."""
    for name in section.algorithms:
        if name not in known:
            raise ConfigError(f'search.algorithms: no algorithm "{name}" here; {nearest(name, known)}')


def space_of(section: SearchSection, *names: str) -> Space:
    """The values to try of an algorithm that goes by these names; a key without a dot is an option of its own."""
    own = {key: values for name in names for key, values in section.algorithms.get(name, {}).items()}
    return section.space | {key if "." in key else f"algorithm.{key}": values for key, values in own.items()}


def plan(section: SearchSection, subjects: Sequence[Subject], seeds: Collection[int], folder: Path) -> Trials:
    """The runs of a search; all of them are checked before the first one runs."""
    if section.seed in seeds:
        raise ConfigError(f"search.seed = {section.seed}: is one of the seeds that are compared; choose another")
    if not any(subject.space for subject in subjects):
        raise ConfigError('search.space: nothing to try; list values, such as "local.lr" = [0.01, 0.1]')
    for key in (key for subject in subjects for key in subject.space):
        if key.split(".")[0] not in ("algorithm", "local", "model") or key == "algorithm.name":
            raise ConfigError(f'search: "{key}" cannot be searched; keys of algorithm, local and model can')
    return {s.label: [_trial(section, s, settings, folder) for settings in drawn(section, s)] for s in subjects}


def drawn(section: SearchSection, subject: Subject) -> list[Settings]:
    """All combinations of a subject's values or, if these are too many, some drawn by seed and name."""
    for key, values in subject.space.items():
        if len({folder_name(str(value), 0) for value in values}) < len(values):
            raise ConfigError(f"search: {key} = {values}: two of them are the same")
    if not subject.space:
        return []
    sizes = [len(values) for values in subject.space.values()]
    total = math.prod(sizes)
    picked = np.arange(total)
    if total > section.trials:
        picked = np.sort(stream(section.seed, SEARCH, subject.label).choice(total, section.trials, replace=False))
    places = zip(*np.unravel_index(picked, sizes), strict=True)
    return [{k: v[i] for (k, v), i in zip(subject.space.items(), place, strict=True)} for place in places]


def _trial(section: SearchSection, subject: Subject, settings: Settings, folder: Path) -> Trial:
    rounds = {"rounds": section.rounds} if section.rounds else {}
    fixed = {"seed": section.seed, "evaluation.test_curve": False} | rounds
    config: RunConfig = parse(with_values(subject.tables, settings | fixed), origin=f"search, {subject.label}")
    algorithms.make(config.algorithm.name, config.algorithm.options)
    if not has_validation(config.data):
        hint = "set data.val above 0" if hasattr(config.data, "val") else "use another source"
        raise ConfigError(f"data: a search needs validation samples, and {config.data.source} has none; {hint}")
    name = folder_name(f"{subject.label} {said(settings)}", section.seed)
    return Trial(settings, Cell(subject.label, section.seed, folder / SEARCH / name, config))


def said(settings: Settings) -> str:
    """Settings for people."""
    return ", ".join(f"{key.removeprefix('algorithm.')} {value}" for key, value in settings.items())


def run(
    section: SearchSection, trials: Trials, folder: Path, workers: int, data_root: Path | None, told: Told
) -> dict[str, Settings]:
    """Run what is missing of a search and record it; returns the best settings by label."""

    def tell(cell: str, round: int, rounds: int) -> None:
        told(f"{SEARCH}/{cell}", round, rounds)

    cells = [trial.cell for group in trials.values() for trial in group]
    with RunFolder(folder / SEARCH).locked():  # or a run that another process works on would count as failed
        failed = try_cells(cells, workers, data_root, tell)
    refuse_failed({k: e for k, e in failed.items() if not isinstance(e, RunError | ClientError)}, len(cells))
    tried = {label: [_outcome(trial, failed) for trial in group] for label, group in trials.items()}
    found = {label: _best(outcomes) for label, outcomes in tried.items()}
    recorded = {label: {"settings": found[label], "tried": tried[label]} for label in found}
    write_json(folder / FOUND, section.model_dump() | {"found": recorded})
    for label, settings in found.items():
        if settings is None:
            first = tried[label][0]["failed"]
            raise RunError(f"search: every setting of {label} failed, try other values; the first: {first}")
    return {label: settings for label, settings in found.items() if settings is not None}


def _outcome(trial: Trial, failed: Failed) -> dict[str, Any]:
    """What is recorded of a trial: how well the round does that the run itself selects, or why there is none."""
    name = trial.cell.folder.name
    out: dict[str, Any] = {"settings": trial.settings, "run": f"{SEARCH}/{name}"}
    if name in failed:
        return out | {"failed": str(failed[name])}
    ran = RunFolder(trial.cell.folder)
    metric, higher = next(iter(recorded_metrics(ran.about).items()))
    lines = [line for line in ran.metrics() if "val" in line]
    rounds = {line["round"]: summarise(line["val"][metric], higher_is_better=higher) for line in lines}
    rounds = {round: summary for round, summary in rounds.items() if math.isfinite(summary.mean)}
    if not rounds:
        return out | {"failed": f"{metric} on validation data is not finite in any round"}
    best = max(rounds, key=lambda r: rounds[r].mean if higher else -rounds[r].mean)
    figures = {"metric": metric, "higher_is_better": higher, "val": rounds[best].mean}
    return out | figures | {"clients": rounds[best].clients, "round": best}


def _best(outcomes: list[dict[str, Any]]) -> Settings | None:
    """The best of what was tried, none if all failed; without anything to try there is nothing to change."""
    if not outcomes:
        return {}
    fine = [o for o in outcomes if "failed" not in o]
    # a client whose figure is not a number is not in the mean: a setting that loses none comes first
    best = max(fine, key=lambda o: (o["clients"], o["val"] if o["higher_is_better"] else -o["val"]), default=None)
    return None if best is None else best["settings"]


def notes(folder: Path) -> list[str]:
    """Lines that stand below a table: how its settings were found, and which they are."""
    record = read_json(folder / FOUND)
    rounds = f" of {record['rounds']} rounds" if record["rounds"] else ""
    how = f"{record['trials']} trials{rounds} each, seed {record['seed']}; {FOUND} has all of them."
    lines = ["", f"Settings were found by search on validation data: {how}", ""]
    for label, entry in record["found"].items():
        tried, failed = len(entry["tried"]), sum("failed" in t for t in entry["tried"])
        short = [f"tried {tried} of {record['trials']}"] if tried < record["trials"] else []
        short += [f"{failed} failed"] if failed else []
        what = said(entry["settings"]) + (f" ({', '.join(short)})" if short else "")
        lines.append(f"- {label}: {what if tried else 'nothing to search'}")
    return lines
