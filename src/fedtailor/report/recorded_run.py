"""A run read from its folder, finished or not, and the runs next to it on the same task."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor import algorithms
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.task import recorded_metrics
from fedtailor.errors import RunError, UserError
from fedtailor.experiments.config import RunConfig, parse, read_toml
from fedtailor.experiments.store import ABOUT, CONFIG, RESULTS, RunFolder, parse_round
from fedtailor.experiments.store import METRICS as LINES
from fedtailor.studies.compare import GRID

Line = dict[str, Any]


@dataclass(frozen=True)
class RecordedRun:
    """One run, as its folder was at one moment."""

    path: Path
    config: RunConfig
    about: dict[str, Any]
    lines: list[Line]  # one per round, those of the preparation included
    unreadable: int  # lines that are not JSON
    results: dict[str, Any] | None

    @property
    def clients(self) -> list[str]:
        return list(self.about["clients"])

    @property
    def metric(self) -> str:
        return next(iter(recorded_metrics(self.about)))

    @property
    def higher(self) -> bool:
        return recorded_metrics(self.about)[self.metric]

    @property
    def kind(self) -> type[Algorithm] | None:
        """The algorithm; None if it is not registered: reading a run imports no code that the run names."""
        return algorithms.algorithms().get(self.config.algorithm.name)

    @property
    def title(self) -> str:
        return (self.kind and self.kind.title) or self.config.algorithm.name

    @property
    def units(self) -> str:
        """A sentence on the unit of errors, if the target of a table is standardised."""
        prepared = RunFolder(self.path).preparation
        if prepared is None or self.about["task"] != "regression" or prepared.target.sd == 1:
            return ""
        return f"Errors here are in standard deviations of {prepared.target.name}: 1 is {prepared.target.sd:.6g}."

    @property
    def tested(self) -> list[float]:
        """The main metric of every client in the last round, on test data; empty before the end."""
        return [] if self.results is None else list(self.results["last"]["clients"][self.metric])

    def measured(self, split: str, metric: str) -> list[tuple[int, list[float]]]:
        """Round and one number per client, of the rounds with an evaluation."""
        return [(line["round"], line[split][metric]) for line in self.lines if metric in line.get(split, {})]


def read_run(path: Path) -> RecordedRun:
    """Read a run; raises `RunError` if the folder is not a run or was changed."""
    folder = RunFolder.open(path)
    about, config = folder.about, _config_of(folder)
    folder.check_rounds()
    lines, unreadable = _lines(path / LINES, are_checked=about.get("checked_lines") is True)
    results = folder.results
    if results is not None:  # then it is known how many there were
        unreadable = max(unreadable, int(results.get("lines", len(lines))) - len(lines))
    return RecordedRun(path, config, about, lines, unreadable, results)


def _config_of(folder: RunFolder) -> RunConfig:
    if "config_sha256" in folder.about:
        return folder.config
    return parse(read_toml(folder.path / CONFIG), RunConfig, str(folder.path / CONFIG))  # from before it was kept


def _lines(path: Path, *, are_checked: bool) -> tuple[list[Line], int]:
    """Complete lines, and how many others; the last line may still be being written."""
    lines, unreadable = [], 0
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            lines.append(_validate_line(parse_round(line, are_checked=are_checked, where=str(path))))
        except (ValueError, TypeError, KeyError, RunError):
            unreadable += 1
    return lines, unreadable


def _validate_line(line: Line) -> Line:
    for key in ("round", "up", "down", "seconds"):
        float(line[key])
    return line


def is_comparison(path: Path) -> bool:
    """Whether a folder contains runs but is not one itself; raises `RunError` if it is neither."""
    if (path / CONFIG).is_file():
        return False
    if (path / GRID).is_file() or any(path.glob(f"*/{ABOUT}")):
        return True
    raise RunError(f"{path}: neither a run nor a folder of runs; fedtailor run CONFIG or fedtailor compare makes one")


def finished_run_beside(run: RecordedRun, algorithm: str) -> RecordedRun | None:
    """A finished run of another algorithm on the same task, with the same clients, in the same parent folder."""
    for other in sorted(run.path.resolve().parent.glob(f"*/{RESULTS}")):
        with suppress(UserError, KeyError):  # a damaged run is no neighbour
            if _config_of(RunFolder(other.parent)).task_id == run.config.task_id:
                neighbour = read_run(other.parent)
                if neighbour.config.algorithm.name == algorithm and neighbour.clients == run.clients:
                    return neighbour
    return None


def gains(mine: Iterable[float], theirs: Iterable[float], higher: bool) -> list[float]:
    """Gain of each client; positive is better."""
    return [(m - t) if higher else (t - m) for m, t in zip(mine, theirs, strict=True)]


def known(values: Iterable[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def split_name(folder: str) -> tuple[str, int] | None:
    """Label and seed of the folder of a cell, such as "fedavg-seed0"."""
    parts = re.fullmatch(r"(.+)-seed(-?\d+)", folder)
    return (parts[1], int(parts[2])) if parts else None
