"""A fit of tables from beginning to end: candidates, choice, record; the same call on a finished one reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtailor.core.data import FederatedData
from fedtailor.data.tabular.earlier_rows import row_keys
from fedtailor.errors import RunError
from fedtailor.experiments.building import task_of
from fedtailor.experiments.store import FIT, read_json, write_json
from fedtailor.studies import linear_candidates, table_fit
from fedtailor.studies.effects import EFFECTS, out_of_fold_predictions, table_effects
from fedtailor.studies.fit_folder import claimed
from fedtailor.studies.grid import CellListener
from fedtailor.studies.site_metrics import chosen_metric
from fedtailor.studies.table_record import table_record
from fedtailor.studies.training_card import CARD, training_card

ROWS = "rows.json"  # which rows are for training and which for testing, by their hashes


def fit_table(
    tables: dict[str, Any],
    loaded: FederatedData,
    out: Path,
    root: Path | None,
    listener: CellListener,
    limit: float,
    metric: str = "",
) -> dict[str, Any]:
    """Run what is missing, choose for every site, and record it; returns the record."""
    clock = linear_candidates.Clock(limit)
    cells = linear_candidates.cells_of(tables, loaded, out)
    if not metric and loaded.preparation.target.is_log:
        metric = "mae"  # medians are what it measures
    metric_name = chosen_metric(task_of(cells[0].config, loaded), metric).name  # refused before anything is written
    claim = claimed(out, "auto", cells)
    held = read_json(out / FIT)
    if "sites" in held:
        if metric and held["metric"] != metric_name:
            raise RunError(
                f"{out}: shows {held['metric']}; choose another folder with --out for --metric {metric_name}"
            )
        return dict(held)
    write_json(out / ROWS, row_keys(loaded))
    selection, data = table_fit.fit_tables(cells, loaded, out, cells[0].seed, root, listener, limit)
    record = (
        {"settings": claim} | table_record(selection, data, out, cells[0].seed, metric) | {"dropped": selection.dropped}
    )
    write_json(out / FIT, record)
    write_json(out / CARD, training_card(data, *out_of_fold_predictions(selection, data, cells[0].seed, record)))
    if clock.has_time(0.5):  # else `explain` computes them when somebody asks
        write_json(out / EFFECTS, table_effects(selection, data, out, cells[0].seed, record))
    return record
