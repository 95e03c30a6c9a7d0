"""What a fit means: coefficients with intervals, importance of columns, and how predictions change with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.task import Metric
from fedtailor.errors import UserError
from fedtailor.experiments.building import task_of
from fedtailor.metrics.library import find
from fedtailor.studies import table_fit
from fedtailor.studies.calibration import applied
from fedtailor.studies.coefficients import coefficients_of
from fedtailor.studies.cross_fitting import folds_of, site_of_rows
from fedtailor.studies.curves import curves, places_of
from fedtailor.studies.importance import Predict, importance
from fedtailor.studies.site_metrics import in_units
from fedtailor.studies.table_fit import ALONE, Selection
from fedtailor.studies.terms import within

EFFECTS = "effects.json"
MOST_CURVES = 4  # columns
Floats = NDArray[np.float64]


def table_effects(
    selection: Selection, data: FederatedData, out: Path, seed: int, record: dict[str, Any]
) -> dict[str, Any]:
    """As effects.json has it. What cannot be computed is left out: a fit does not fail for it."""
    effects: dict[str, Any] = {}
    try:
        effects["coefficients"] = coefficients_of(selection.cells, selection.weights, data)
    except (UserError, torch.linalg.LinAlgError, np.linalg.LinAlgError):
        effects["coefficients"] = None
    used = [i for i, cell in enumerate(selection.cells) if cell.label == ALONE or selection.weights[:, i].any()]
    selection = replace(selection, cells=[selection.cells[i] for i in used], weights=selection.weights[:, used])
    calibration = np.array([row.get("calibration", (1.0, 0.0)) for row in record["sites"].values()])

    def predict(rows: Rows) -> Tensor:
        outputs = table_fit.delivered_outputs(selection, data, rows, out)["personal"]
        if data.task != "classification":
            return outputs
        return torch.from_numpy(applied(outputs.numpy(), calibration[site_of_rows(rows)]))

    metric = find(task_of(selection.cells[0].config, data), record["metric"])
    return effects | of_predictions(predict, data, metric, seed)


def of_predictions(predict: Predict, data: FederatedData, metric: Metric, seed: int) -> dict[str, Any]:
    """Importance and curves of whatever serves the sites, on rows that no model was trained on, if there are any."""
    held = data.test if len(data.test.x) >= 2 else data.train
    unit = 1.0 if data.task == "classification" or data.preparation is None else float(data.preparation.target.sd)
    if data.preparation is not None and data.preparation.target.is_log:
        metric, unit = in_units(metric, data.preparation.target), 1.0
    places, varies = places_of(data), within(held)
    inner = {name: at for name, at in places.items() if varies[at].any()}
    importances = importance(predict, held, data.clients, inner, metric, unit, seed) | {
        "held_out": held is data.test,
        "constant": [name for name in places if name not in inner],
    }
    top = [each["column"] for each in importances["columns"] if each["mean"] > 0][:MOST_CURVES]
    drawn = curves(predict, lambda o: readable(o, data), held, data, top, seed) if top and data.preparation else []
    names = [data.preparation.target.name] if data.preparation and data.task != "classification" else list(data.classes)
    return {"importance": importances, "curves": drawn, "outputs": names[1:] if len(names) == 2 else names}


def out_of_fold_predictions(
    selection: Selection, data: FederatedData, seed: int, record: dict[str, Any]
) -> tuple[Floats | None, NDArray[np.int64]]:
    """What models without them say of training rows, one number a row as `drift` compares them; and whose they are."""
    held = folds_of(data, seed) >= 0
    whose, outputs = site_of_rows(data.train)[held], selection.out_of_fold
    if len(outputs) != len(whose) or not len(whose):  # nobody has two rows
        return None, whose
    if data.task == "classification":
        calibration = np.array([row.get("calibration", (1.0, 0.0)) for row in record["sites"].values()])
        outputs = torch.from_numpy(applied(outputs.numpy(), calibration[whose]))
    values = readable(outputs, data)
    return (values.max(1) if values.shape[1] > 1 else values[:, 0]), whose


def readable(outputs: Tensor, data: FederatedData) -> Floats:
    """Numbers in units of the target, the probability of the second of two classes, or of each of several."""
    if data.task == "classification":
        p = outputs.softmax(1).double().numpy()
        return p[:, 1:] if p.shape[1] == 2 else p
    numbers: Floats = data.preparation.target.readable(outputs.double()).numpy()
    return numbers
