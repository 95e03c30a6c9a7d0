"""The linear candidates of a fit to tables: alone, in common and mixed, each solved, and cross-fitted within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.samples import FederatedData
from fedtailor.core.trees import Params
from fedtailor.errors import ClientError, UserError
from fedtailor.experiments import runner, trust
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import CONFIG, RunFolder, read_json, read_tree
from fedtailor.studies.cross_fitting import out_of_fold
from fedtailor.studies.grid import Cell, Told

MOST_SLOPES, MOST_TOGETHER = 150, 8
ALONE, COMMON = "alone", "common"
FAILURES = (UserError, ClientError, torch.linalg.LinAlgError)  # of one candidate, not of the fit


def cells_of(tables: dict[str, Any], data: FederatedData, out: Path) -> list[Cell]:
    """The linear candidates, from simple to rich, each a run of one round."""
    is_class = data.task == "classification"
    kind = "mixedlogit" if is_class else "mixedmodel"
    size = (data.shape[0] + 1) * max(data.outputs - 1, 1)
    effects = {COMMON: "none", "mixed, intercept": "intercept"}
    if size <= MOST_SLOPES:
        effects["mixed, slopes"] = "diagonal"
    if size <= MOST_TOGETHER and not is_class:
        effects["mixed, slopes together"] = "full"
    wanted = {ALONE: {"name": "linearalone"}}
    if len(data.clients) > 1:
        wanted |= {label: {"name": kind, "effects": effect} for label, effect in effects.items()}
    data_table = tables["data"] | ({"val": 0.0} if "val" in tables["data"] else {})
    solved = {
        "rounds": 1,
        "data": data_table,
        "model": {"name": "linear", "dtype": "float64"},
        "evaluation": {"every": 1},
    }
    cells = []
    for label, algorithm in wanted.items():
        config: RunConfig = parse(tables | solved | {"algorithm": algorithm}, origin="fit")
        name = "-".join([algorithm["name"], *([algorithm["effects"]] if "effects" in algorithm else [])])
        cells.append(Cell(label, config.seed, out / f"{name}-seed{config.seed}", config))
    return cells


class OutOfTime(Exception):
    """The time limit is over before a candidate has ended."""


@dataclass
class Clock:
    """Whether there is time for one more candidate, which takes no longer than the longest so far."""

    limit: float
    begun: float = field(default_factory=time.monotonic)
    longest: float = 0.0

    def has_time(self) -> bool:
        return not self.limit or time.monotonic() - self.begun + self.longest < self.limit

    def check(self) -> None:
        """Raise `OutOfTime` when the limit is over."""
        if self.limit and time.monotonic() - self.begun > self.limit:
            raise OutOfTime

    def timed(self, work: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        done = work()
        self.longest = max(self.longest, time.monotonic() - begun)
        return done


def cross_fitted(
    cells: list[Cell], data: FederatedData, folds: NDArray[np.int64], root: Path | None, told: Told, clock: Clock
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Train every linear candidate on all rows, then without each fold; returns what it says out of fold, by label,
    and what was dropped and why. The sites' own models are always there."""
    spoken: dict[str, Tensor] = {}
    dropped: list[dict[str, Any]] = []
    for cell in cells:
        why = "the time limit"
        if not spoken or clock.has_time():
            try:
                check = clock.check if spoken else lambda: None
                spoken[cell.label] = clock.timed(partial(_one, cell, data, folds, root, told, check))
                continue
            except OutOfTime:
                pass
            except FAILURES as error:
                if cell.label == ALONE:
                    raise
                why = str(error).splitlines()[0]
        dropped.append({"label": cell.label, "round": 0, "val": None, "why": why})
    return spoken, dropped


def _one(
    cell: Cell,
    data: FederatedData,
    folds: NDArray[np.int64],
    root: Path | None,
    told: Told,
    check: Callable[[], None],
) -> Tensor:
    def listen(p: runner.Progress) -> None:
        told(cell.folder.name, p.round, p.rounds)

    def fold_done(fold: int) -> None:
        told(f"{cell.folder.name}, folds", fold, int(folds.max()) + 1)
        check()

    if (cell.folder / CONFIG).exists():
        trust.remember(cell.config)
        runner.resume(cell.folder, root, listen, loaded=data)
    else:
        runner.start(cell.config, cell.folder, root, listen, loaded=data)
    check()
    saved = RunFolder(cell.folder).load_checkpoint()
    assert saved is not None
    return out_of_fold(cell.config, data, folds, saved[1]["state"]["server"] or None, fold_done)


def delivered(cell: Cell, sites: Sequence[str]) -> list[Params]:
    """The models of a candidate that was trained on all rows, one for each site."""
    folder = cell.folder / "personal" / "last"
    index = read_json(folder / "index.json")
    return [read_tree(folder, index[site]) for site in sites]
