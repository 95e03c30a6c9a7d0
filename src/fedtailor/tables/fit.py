"""A fit from beginning to end; the same call on a finished one reads its record.

Tables are fitted by linear and mixed models and boosted trees. Other data, and a model that is named, go to `halving`.
Everything is chosen on validation data or out-of-fold predictions; test data is read only for the figures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.algorithms._programs.boosting import FEWEST_ROWS
from fedtailor.core.data import FederatedData
from fedtailor.data.fingerprint import digest
from fedtailor.data.tabular.earlier_rows import row_keys
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.building import task_of
from fedtailor.experiments.store import CONFIG, FIT, read_json, write_json
from fedtailor.experiments.user_code import code_difference, code_of
from fedtailor.numerics.blending import row_losses
from fedtailor.studies.grid import Cell, CellListener
from fedtailor.tables import candidates, fit_sources
from fedtailor.tables.blend import Boosted, Selection, select, shared_trees_path
from fedtailor.tables.boosted_trees import SHARED
from fedtailor.tables.candidates import (
    ALONE,
    FOLDS,
    Clock,
    CrossFitted,
    OutOfTime,
    all_in_training,
    cross_fit,
    delivered_models,
    folds_of,
    site_of_rows,
    unaffordable,
)
from fedtailor.tables.drift import CARD, training_card
from fedtailor.tables.effects import EFFECTS, out_of_fold_predictions, table_effects
from fedtailor.tables.fit_record import table_record
from fedtailor.tables.fit_sources import read_source
from fedtailor.tables.halving import choose_models, plan, run_plan
from fedtailor.tables.model_selection import CAUTION
from fedtailor.tables.shared_trees import fit_shared_trees
from fedtailor.tables.site_metrics import select_metric

RARE = 0.05  # share of a class of two below which figures show the area under the ROC curve in place of accuracy
FOR_CANDIDATES = 0.75  # of a time limit, with reading; the rest is for choosing and for the record
ROWS = "rows.json"  # which rows are for training and which for testing, by their hashes


def fit(
    source: Mapping[str, Any],
    out: Path,
    *,
    algorithm: str = "auto",
    data_root: Path | None = None,
    listener: CellListener = lambda cell, round, rounds: None,
    time_limit: float = 0.0,
    metric: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Run what is missing of a fit, choose for every site, and record it; returns the record, as fit.json has it.

    source: the table [data] of a configuration; a folder of files if it names no source.
    options: as those of `plan`.
    time_limit: seconds, for tables; candidates for which there is no time are left out, and named. 0 is none.
    metric: what figures show of a table, such as "auroc"; models are chosen by log loss or squared error.
    """
    begun = time.monotonic()
    tables, loaded = read_source(source, algorithm=algorithm, data_root=data_root, **options)
    if fit_sources.is_table_fit(loaded, tables, algorithm):
        left = max(FOR_CANDIDATES * time_limit - (time.monotonic() - begun), 0.01) if time_limit else 0.0
        return fit_table(tables, loaded, out, data_root, listener, left, metric)
    if metric:
        raise ConfigError(
            f'--metric {metric}: for tables with --algorithm auto; else --set evaluation.decide="{metric}"'
        )
    fit_plan = plan(source, out, algorithm=algorithm, data_root=data_root, **options | {"loaded": loaded})
    claim = claim_folder(out, algorithm, fit_plan.cells)
    finished, dropped = run_plan(fit_plan, data_root, listener)
    record = {"settings": claim} | choose_models(fit_plan, finished) | {"dropped": dropped}
    write_json(out / FIT, record)
    return record


def fit_table(
    tables: dict[str, Any],
    loaded: FederatedData,
    out: Path,
    root: Path | None,
    listener: CellListener,
    limit: float,
    metric: str = "",
) -> dict[str, Any]:
    """Run missing candidates, select the models of every site, and write the record."""
    clock = candidates.Clock(limit)
    cells = candidates.cells_of(tables, loaded, out)
    if not metric and loaded.preparation.target.is_log:
        metric = "mae"  # medians are what it measures
    if not metric and _is_rare(loaded):
        metric = "auroc"  # whoever says that it never happens is nearly always right
    metric_name = select_metric(task_of(cells[0].config, loaded), metric).name  # refused before anything is written
    claim = claim_folder(out, "auto", cells)
    held = read_json(out / FIT)
    if "sites" in held:
        if metric and held["metric"] != metric_name:
            raise RunError(
                f"{out}: shows {held['metric']}; choose another folder with --out for --metric {metric_name}"
            )
        return dict(held)
    write_json(out / ROWS, row_keys(loaded))
    selection, data = train_and_select(cells, loaded, out, cells[0].seed, root, listener, limit)
    record = (
        {"settings": claim} | table_record(selection, data, out, cells[0].seed, metric) | {"dropped": selection.dropped}
    )
    write_json(out / FIT, record)
    write_json(out / CARD, training_card(data, *out_of_fold_predictions(selection, data, cells[0].seed, record)))
    if clock.has_time(0.5):  # else `explain` computes them when somebody asks
        write_json(out / EFFECTS, table_effects(selection, data, out, cells[0].seed, record))
    return record


def _is_rare(data: FederatedData) -> bool:
    """Whether one of two classes is so rare that accuracy says nothing."""
    if data.task != "classification" or data.outputs != 2:
        return False
    counts = torch.bincount(data.train.y, minlength=2)
    return float(counts.min()) < RARE * float(counts.sum())


def claim_folder(out: Path, algorithm: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """Claim the folder for this fit; a `RunError` if it holds another one."""
    code = [code_of(cell.config) for cell in cells]
    claim = {
        "algorithm": algorithm,
        "caution": CAUTION,
        "runs": [cell.config.plain() for cell in cells],
        "files": digest(cells[0].config.data),
        "code": code,
    }
    path = out / FIT
    if path.exists():
        current: dict[str, Any] = {key: claim[key] for key in ("files", "code")}  # not recorded in older folders
        saved = current | read_json(path)["settings"]
        if saved | current != claim:
            raise RunError(f"{out}: holds another fit; choose another folder with --out")
        if saved["files"] != claim["files"]:
            raise RunError(f"{out}: the data is no longer what it was fitted to; choose another folder with --out")
        changes = (code_difference(old, new) for old, new in zip(saved["code"], code, strict=False))
        if change := next(filter(None, changes), ""):
            raise RunError(f"{out}: {change} since it was fitted; choose another folder with --out")
        return claim
    if out.exists() and any(out.glob(f"*/{CONFIG}")):
        raise RunError(f"{out}: holds other runs; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, {"settings": claim})
    return claim


def train_and_select(
    cells: list[Cell],
    loaded: FederatedData,
    out: Path,
    seed: int,
    root: Path | None,
    listener: CellListener,
    limit: float,
) -> tuple[Selection, FederatedData]:
    """Train and cross-fit the candidates, then select."""
    data, clock = all_in_training(loaded).to(torch.float64), Clock(limit)
    folds = folds_of(data, seed)
    found = cross_fit(cells, data, folds, root, listener, clock)
    shared = boost_shared_trees(cells, data, folds, found, out, clock, listener)
    selection = select(cells, data, folds, found.outputs, seed, clock, out, shared, listener)
    selection.dropped.extend([*found.dropped, *unaffordable(data)])
    return selection, data


def boost_shared_trees(
    cells: list[Cell],
    data: FederatedData,
    folds: NDArray[np.int64],
    found: CrossFitted,
    out: Path,
    clock: Clock,
    listener: CellListener,
) -> Boosted | None:
    """Trees of all sites on what the best shared linear model leaves; None where they do not help, or for no time."""
    held = torch.from_numpy(folds >= 0)
    losses = {
        label: float(row_losses(outputs[held], data.train.y[held], data.task == "classification").sum())
        for label, outputs in found.outputs.items()
        if label != ALONE
    }
    is_complete = int(folds.max()) + 1 == FOLDS  # else a fold has no rows, and no model
    if not losses or int((folds >= 0).sum()) < FEWEST_ROWS or not is_complete:
        return None
    label = min(losses, key=lambda each: losses[each])
    cell, is_class = next(cell for cell in cells if cell.label == label), data.task == "classification"
    models = [delivered_models(cell, data.clients), *found.models[label]]
    bases = [model.outputs(data.train, is_class) for model in models]
    try:
        clock.check()
        trees = fit_shared_trees(
            data.train.x,
            data.train.y,
            bases,
            folds,
            site_of_rows(data.train),
            is_class,
            clock.check,
            lambda done, of: listener(SHARED, done, of),
        )
    except OutOfTime:
        found.dropped.append({"label": SHARED, "round": 0, "val": None, "why": "the time limit"})
        return None
    if trees is None:
        return None
    trees.trees.save(shared_trees_path(out))
    return Boosted(label, trees)
