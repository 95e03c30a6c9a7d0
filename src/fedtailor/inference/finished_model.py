"""A model that a federation has fitted, read from its server's folder."""

from __future__ import annotations

from typing import Any

from fedtailor.data.tabular.formula import Design, FormulaRows
from fedtailor.errors import RunError
from fedtailor.experiments.store import RunFolder
from fedtailor.inference.statistical_model import Request, StatisticalModel, as_model


def finished(request: Request, design: Design, folder: RunFolder) -> StatisticalModel:
    """The model of a finished run, by what its server has; modes are at the sites."""
    saved = folder.load_checkpoint()
    if saved is None or "center" not in saved[1]["state"]["server"]:
        raise RunError(f"{folder.path}: the model was not fitted; see the reason in the folder's metrics")
    about: Any = folder.about
    rows = FormulaRows(tuple(about["clients"]), tuple(about["notes"]))
    return as_model(request, design, rows, saved[1]["state"]["server"], None)
