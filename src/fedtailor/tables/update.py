"""An update: a fit of the rows that there are now, started from the earlier fit.

It is a fit of its own in the folder of the first one. Linear models start at the earlier solution; boosted trees of
unchanged rows are reused. Test rows stay test rows. The earlier models serve until the new ones are
complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.task import Metric
from fedtailor.data.configs import FolderConfig
from fedtailor.data.fingerprint import digest
from fedtailor.data.tabular.earlier_rows import EarlierRows, SiteChange
from fedtailor.data.tabular.prepare import prepare_tables
from fedtailor.data.tabular.read import read_client_tables
from fedtailor.errors import ConfigError, DataError, RunError
from fedtailor.experiments.building import data_seed, task_of
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.runner import config_of
from fedtailor.experiments.store import (
    FIT,
    UPDATE,
    RunFolder,
    latest,
    make_current,
    number_of,
    part_of,
    read_json,
    root_of,
    write_json,
    write_tree,
)
from fedtailor.studies.grid import CellListener
from fedtailor.tables.boosted_trees import KEPT, TREES_FOLDER
from fedtailor.tables.candidates import START
from fedtailor.tables.fit import ROWS, fit_table
from fedtailor.tables.fit_sources import append_rows
from fedtailor.tables.serve import Personal, ServedModels
from fedtailor.tables.site_metrics import at_site, select_metric

OF_CANDIDATES = ("algorithm", "model", "evaluation", "rounds")  # set by the fit itself


@dataclass(frozen=True)
class UpdateResult:
    """Where the models are now, the record, and whether anything was new."""

    folder: Path
    record: dict[str, Any]
    is_new: bool


def update(
    path: Path,
    *,
    data: Path | None = None,
    rows: Mapping[str, Any] | None = None,
    data_root: Path | None = None,
    listener: CellListener = lambda cell, round, rounds: None,
    time_limit: float = 0.0,
) -> UpdateResult:
    """Fit the rows that there are now, and serve the new models once they are complete.

    data: where all rows are now, if not where the fit read them. rows: new rows of sites, beside those of the fit.
    """
    if data is not None and rows is not None:
        raise ConfigError("update: give all rows with --data, or new ones with --rows, not both")
    root = root_of(path)
    before, number = latest(root), number_of(root) + 1
    record, config = read_earlier(before)
    out = root / f"{UPDATE}{number}"
    source = config.data
    assert isinstance(source, FolderConfig)
    if data is not None:
        source = source.model_copy(update={"path": data})
    if rows is not None:
        source = append_rows(source, rows, out)
    _drop_other(out, source)
    earlier = _earlier_rows(before, RunFolder(part_of(before, record["common"])), number)
    loaded = prepare_tables(read_client_tables(source), source, data_seed(config), earlier=earlier)
    loaded = replace(loaded, name=record["data"])
    lost_sites = [site for site in record["sites"] if site not in loaded.clients]
    if not lost_sites and not any(change.is_any for change in earlier.changes.values()):
        shutil.rmtree(out, ignore_errors=True)
        return UpdateResult(before, record, False)
    _copy_start_states(before, out, loaded)
    tables = {key: value for key, value in config.plain().items() if key not in OF_CANDIDATES}
    tables["data"] = source.model_dump(mode="json", exclude_none=True)
    new = fit_table(tables, loaded, out, data_root, listener, time_limit, record["metric"])
    new["update"] = _changes(before, out, record, new, earlier, loaded, lost_sites)
    write_json(out / FIT, new)
    _carry_newcomers(before, out, record, new, loaded)
    make_current(root, out)
    return UpdateResult(out, new, True)


def _earlier_rows(fit: Path, run: RunFolder, number: int) -> EarlierRows:
    """The rows of a fit, and how one of its runs prepared them."""
    if not (fit / ROWS).exists() or run.preparation is None:
        raise RunError(f"{fit}: does not know which rows it was tested on; an earlier fedtailor wrote it, fit anew")
    return EarlierRows(run.preparation, read_json(fit / ROWS), number)


def rows_of_update(fit: Path, run: RunFolder) -> FederatedData:
    """The data that an update was fitted to, split as it was then."""
    config = config_of(run)
    assert isinstance(config.data, FolderConfig)
    earlier = _earlier_rows(fit, run, 0)
    return prepare_tables(read_client_tables(config.data), config.data, data_seed(config), earlier=earlier)


def read_earlier(folder: Path) -> tuple[dict[str, Any], RunConfig]:
    """The record of a finished fit of tables, and the configuration of one of its runs."""
    if not (folder / FIT).exists():
        raise RunError(f"{folder}: not a fit; fedtailor update is for the folder of fedtailor fit")
    record = read_json(folder / FIT)
    if "sites" not in record:
        raise RunError(f"{folder}: not finished yet; call the same fit again")
    is_table = all("weights" in row for row in record["sites"].values())
    run = RunFolder.open(part_of(folder, record["common"] if is_table else record["newcomers"]))
    config = config_of(run)
    if not is_table or not isinstance(config.data, FolderConfig):
        raise RunError(f"{folder}: update is for fits of your own tables with --algorithm auto; fit this one anew")
    return dict(record), config


def _drop_other(out: Path, source: FolderConfig) -> None:
    """Keep the folder of an interrupted update, unless the rows have changed since."""
    if (out / FIT).exists() and read_json(out / FIT)["settings"]["files"] != digest(source):
        for held in out.iterdir():
            if held.name != "data":
                shutil.rmtree(held) if held.is_dir() else held.unlink()


def _copy_start_states(before: Path, out: Path, loaded: FederatedData) -> None:
    """Copy the states of earlier runs as start values, and boosted trees, which are reused where rows are the same."""
    start = out / START
    start.mkdir(parents=True, exist_ok=True)
    for run in sorted(before.glob("*/run.json")):
        folder = RunFolder(run.parent)
        saved = folder.load_checkpoint()
        is_same = folder.about["shape"] == list(loaded.shape) and folder.about["classes"] == list(loaded.classes)
        if saved is not None and is_same and saved[1]["state"]["server"]:
            name = run.parent.name
            write_json(start / f"{name}.json", write_tree(start / f"{name}.safetensors", saved[1]["state"]["server"]))
    (out / TREES_FOLDER).mkdir(exist_ok=True)
    for file in (before / TREES_FOLDER).glob(f"{KEPT}*"):
        shutil.copy2(file, out / TREES_FOLDER / file.name)


def _changes(
    before: Path,
    out: Path,
    old: dict[str, Any],
    new: dict[str, Any],
    earlier: EarlierRows,
    loaded: FederatedData,
    lost_sites: list[str],
) -> dict[str, Any]:
    """Changed rows, and the test figures of the earlier and the new models on the same rows."""
    config = RunFolder(out / new["common"]).config
    metric = select_metric(task_of(config, loaded), new["metric"])
    sites, served = {}, {"before": ServedModels(before), "after": ServedModels(out)}
    for name in loaded.clients:
        change = earlier.changes[name]
        figures = {"before": float("nan"), "after": float("nan")}
        if len(change.kept_test):
            for key, models in served.items():
                own = models.personal(name)
                figures[key] = _metric_on_kept_rows(own, name, earlier.raw[name], change, metric, loaded.classes)
        sites[name] = {
            "rows_before": change.before,
            "rows_after": change.after,
            "added": change.added,
            "removed": change.removed,
            "same_test_rows": len(change.kept_test),
            **figures,
        }
    return {
        "of": before.name,
        "metric": metric.name,
        "sites": sites,
        "changed": [name for name, change in earlier.changes.items() if change.is_any],
        "new_sites": [name for name in loaded.clients if name not in old["sites"]],
        "gone": lost_sites,
        "notes": earlier.notes,
    }


def _metric_on_kept_rows(
    own: Personal, name: str, site: Any, change: SiteChange, metric: Metric, classes: tuple[str, ...]
) -> float:
    """The metric of a site's model on the test rows that the earlier fit had too, in units of the target."""
    at = change.kept_test
    assert own.preparation is not None
    numeric = {column: values[at] for column, values in site.numeric.items()}
    categorical = {column: [values[int(i)] for i in at] for column, values in site.categorical.items()}
    x = torch.from_numpy(own.preparation.encode(name, numeric, categorical, site.file, [])).to(own.model.dtype)
    target = own.preparation.target
    if classes:
        if set(classes) != set(own.classes):
            return float("nan")
        place = np.array([own.classes.index(label) for label in classes])
        y = torch.from_numpy(place[site.y[at]])
    else:
        y = torch.from_numpy(target.standardise(site.y[at]))
    outputs, unit = own.outputs(x).double(), target.sd if target.task == "regression" else 1.0
    if target.is_log:  # figures are of the numbers themselves
        outputs, y, unit = target.readable(outputs), target.readable(y), 1.0
    return at_site(metric, outputs, Rows(x, y, torch.tensor([0, len(at)], device="cpu")), 0, unit)


def _carry_newcomers(before: Path, out: Path, old: dict[str, Any], new: dict[str, Any], loaded: FederatedData) -> None:
    """Copy the models of newcomers, if the features are the same and they are no sites of the new fit."""
    source, target = part_of(before, old["newcomers"]), part_of(out, new["newcomers"])
    if RunFolder(source).about["shape"] != list(loaded.shape):
        return
    for held in source.glob("newcomers/*/index.json"):
        goal = target / "newcomers" / held.parent.name
        if held.parent.name not in loaded.clients and not goal.exists():
            partial = goal.with_name(f".{goal.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(held.parent, partial)
            partial.rename(goal)


def split_by_site(rows: Any, site: str, column: str | None) -> dict[str, Any]:
    """New rows by site: of one that is named, or by the column that names it."""
    from fedtailor.data.tabular.read import as_frame

    if site:
        return {site: as_frame(rows)}
    frame = as_frame(rows)
    if column is None or column not in frame.columns:
        raise DataError("whose rows? Name the site with --site")
    names = frame[column].cast(pl.String)
    return {name: frame.filter(names == name) for name in names.drop_nulls().unique(maintain_order=True)}
