"""The linear candidates of a fit to tables: alone, in common and mixed, each solved, and cross-fitted within a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.algorithms._shared.table_fit import usable
from fedtailor.core.data import FederatedData
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ClientError, RoundAbandoned, UserError
from fedtailor.experiments import runner, user_source
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import CONFIG, RunFolder, read_json, read_tree
from fedtailor.studies.cross_fitting import out_of_fold
from fedtailor.studies.grid import Cell, CellListener

MORE_ROWS = 1.5  # training on all rows, and what is saved of it, in times of the first fold
ALONE, COMMON = "alone", "common"
START = "start"  # folder of states that an update begins with
LABELS = {  # by what differs between sites
    "": ALONE,
    "none": COMMON,
    "intercept": "mixed, intercept",
    "diagonal": "mixed, slopes",
    "full": "mixed, slopes together",
}
FAILURES = (UserError, ClientError, RoundAbandoned, torch.linalg.LinAlgError)  # of one candidate, not of the fit


def kind_of(task: str) -> str:
    """The mixed model of a task."""
    return {"classification": "mixedlogit", "count": "mixedpoisson"}.get(task, "mixedmodel")


def cells_of(tables: dict[str, Any], data: FederatedData, out: Path) -> list[Cell]:
    """The linear candidates, from simple to rich, each a run of one round."""
    kind = kind_of(data.task)
    size = (data.shape[0] + 1) * max(data.outputs - 1, 1)
    is_gaussian = data.task == "regression"
    effects = {LABELS[e]: e for e in ("none", "intercept", "diagonal", "full") if usable(e, size, is_gaussian)}
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
    """How much of a time limit is left; 0 is none."""

    limit: float
    begun: float = field(default_factory=time.monotonic)

    def check(self, needed: float = 0.0) -> None:
        """Raise `OutOfTime` when the limit is over, or would be after so many seconds more."""
        if self.limit and time.monotonic() - self.begun + needed > self.limit:
            raise OutOfTime

    def has_time(self, part: float = 1.0) -> bool:
        """Whether less than that part of the limit is spent."""
        return not self.limit or time.monotonic() - self.begun < part * self.limit


def cross_fitted(
    cells: list[Cell],
    data: FederatedData,
    folds: NDArray[np.int64],
    root: Path | None,
    listener: CellListener,
    clock: Clock,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Train every linear candidate on all rows, then without each fold; returns what it says out of fold, by label,
    and what was dropped and why. The sites' own models are always there."""
    outputs: dict[str, Tensor] = {}
    dropped: list[dict[str, Any]] = []
    for cell in cells:
        why = "the time limit"
        try:
            outputs[cell.label] = _cross_fitted_cell(
                cell, data, folds, root, listener, clock if outputs else Clock(0.0)
            )
            continue
        except OutOfTime:
            pass
        except FAILURES as error:
            if cell.label == ALONE:
                raise
            why = str(error).splitlines()[0]
        dropped.append({"label": cell.label, "round": 0, "val": None, "why": why})
    return outputs, dropped


def _cross_fitted_cell(
    cell: Cell, data: FederatedData, folds: NDArray[np.int64], root: Path | None, listener: CellListener, clock: Clock
) -> Tensor:
    """Folds begin where the training on all rows ended. With a time limit they come first, since they can be ended at
    any exchange, and show how long the training on all rows will take."""

    def fold_done(fold: int) -> None:
        listener(f"{cell.folder.name}, folds", fold, int(folds.max()) + 1)
        seconds.append(time.monotonic() - clock.begun)

    clock.check()
    seconds = [time.monotonic() - clock.begun]
    if not clock.limit:
        _train(cell, data, root, listener)
        saved = RunFolder(cell.folder).load_checkpoint()
        assert saved is not None
        return out_of_fold(cell.config, data, folds, saved[1]["state"]["server"] or None, fold_done)
    outputs = out_of_fold(cell.config, data, folds, begun_from(cell), fold_done, clock.check)
    clock.check(MORE_ROWS * (seconds[min(1, len(seconds) - 1)] - seconds[0]))
    _train(cell, data, root, listener)
    return outputs


def _train(cell: Cell, data: FederatedData, root: Path | None, listener: CellListener) -> None:
    def listen(p: runner.Progress) -> None:
        listener(cell.folder.name, p.round, p.rounds)

    if (cell.folder / CONFIG).exists():
        user_source.remember(cell.config)
        runner.resume(cell.folder, root, listen, loaded=data)
    else:
        runner.start(cell.config, cell.folder, root, listen, loaded=data, server=begun_from(cell))


def begun_from(cell: Cell) -> Tree:
    """The state from which an update begins, if an earlier fit left one."""
    entry = cell.folder.parent / START / f"{cell.folder.name}.json"
    return read_tree(entry.parent, read_json(entry)) if entry.exists() else None


def delivered(cell: Cell, sites: Sequence[str]) -> list[Params]:
    """The models of a candidate that was trained on all rows, one for each site."""
    folder = cell.folder / "personal" / "last"
    index = read_json(folder / "index.json")
    return [read_tree(folder, index[site]) for site in sites]
