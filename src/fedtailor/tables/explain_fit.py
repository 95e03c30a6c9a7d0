"""The explanation of a fit from its folder; effects that are not stored yet are computed and stored."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.errors import RunError, nearest
from fedtailor.experiments.building import task_of
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.store import ABOUT, FIT, RunFolder, latest, part_of, read_json, write_json
from fedtailor.studies.grid import Cell
from fedtailor.tables.candidates import LABELS
from fedtailor.tables.coefficients import fit_coefficients
from fedtailor.tables.effects import EFFECTS, loss_of, prediction_effects
from fedtailor.tables.serve import ServedModels
from fedtailor.tables.update import rows_of_update
from fedtailor.tables.words import effect_sentences


def explain_fit(path: Path, site: str = "", data_root: Path | None = None, model: str = "") -> dict[str, Any]:
    """Coefficients, importance, curves and words; of one site only if it is named.

    model: label of a linear candidate whose coefficients are asked for; else that which serves the sites most.
    """
    record = read_json(path / FIT)
    if "sites" not in record:
        raise RunError(f"{path}: not finished yet; continue with the same fedtailor fit and --out")
    if site and site not in record["sites"]:
        raise RunError(f'{path}: no site "{site}"; {nearest(site, record["sites"])}')
    if (path / EFFECTS).exists():
        effects = dict(read_json(path / EFFECTS))
    else:
        effects = _compute_effects(path, record, data_root)
        write_json(path / EFFECTS, effects)
    if model and (not effects["coefficients"] or effects["coefficients"]["model"] != model):
        _, data = _experiment(path, record, data_root)
        effects["coefficients"] = _coefficients(path, record, data.to(torch.float64), model)
        if effects["coefficients"] is None:
            raise RunError(f'--model "{model}": cannot be fitted to these rows')
    served = {name: row["served"] for name, row in record["sites"].items() if site in ("", name)}
    effects |= {"words": effect_sentences(effects), "target": record["target"], "served": served}
    return _restrict_to_site(effects, site) if site else effects


def coefficient_rows(effects: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for every term, common (site is None) and of each site, per unit of its column."""
    coefficients, out = effects["coefficients"], []
    for output in coefficients["outputs"] if coefficients else []:
        for term in output["terms"]:
            factor = term["sd"] or 1.0
            for site, each in ((None, term), *zip(coefficients["sites"], term["sites"], strict=True)):
                numbers = {k: None if each[k] is None else each[k] / factor for k in ("value", "low", "high")}
                named = {"term": term["name"], "reference": term["reference"], "class": output["class"]}
                out.append({"site": site} | named | numbers)
    return out


def _experiment(path: Path, record: dict[str, Any], data_root: Path | None) -> tuple[RunFolder, FederatedData]:
    """A run of the fit, and the rows as it had them."""
    folder = RunFolder.open(part_of(path, next(iter(record["sites"].values()))["run"]))
    rows = rows_of_update(path, folder) if "update" in record else None
    data: FederatedData = reload_experiment(folder, data_root, rows).data
    if not data.is_plain or len(data.shape) != 1 or data.task not in ("classification", "regression", "count"):
        raise RunError(f"{path}: not a fit of tables; explain one of its runs, such as {folder.path}")
    return folder, data


def _compute_effects(path: Path, record: dict[str, Any], data_root: Path | None) -> dict[str, Any]:
    """Importance and curves from predictions of the served models; coefficients where models are linear."""
    folder, data = _experiment(path, record, data_root)
    model = cache(ServedModels(latest(path), data_root).personal)

    def predict(rows: Rows) -> Tensor:
        parts = [
            model(site).outputs(rows.of(i)[0].to(data.train.x.dtype)).double()
            for i, site in enumerate(data.clients)
            if int(rows.sizes[i])
        ]
        return torch.cat(parts)

    metric = loss_of(task_of(folder.config, data), record["metric"])
    doubles = data.to(torch.float64)
    linear = _coefficients(path, record, doubles) if "weights" in next(iter(record["sites"].values())) else None
    return {"coefficients": linear, **prediction_effects(predict, doubles, metric, folder.config.seed)}


def _coefficients(path: Path, record: dict[str, Any], data: FederatedData, label: str = "") -> dict[str, Any] | None:
    """Coefficients from the linear candidates in a folder."""
    runs = [RunFolder.open(about.parent) for about in sorted(path.glob(f"*/{ABOUT}"))]
    cells = []
    for run in runs:
        config = run.config
        effects = config.algorithm.options.get("effects", "")
        if run.results is not None and effects in LABELS:
            cells.append(Cell(LABELS[effects], config.seed, run.path, config))
    weights = [[row["weights"].get(cell.folder.name, 0.0) for cell in cells] for row in record["sites"].values()]
    try:
        return fit_coefficients(cells, np.array(weights), data, label)
    except (RunError, torch.linalg.LinAlgError, np.linalg.LinAlgError):
        return None


def _restrict_to_site(effects: dict[str, Any], site: str) -> dict[str, Any]:
    """Effects of one site beside the common ones."""
    coefficients = effects["coefficients"]
    if coefficients:
        at = list(coefficients["sites"]).index(site)
        outputs = [
            output | {"terms": [term | {"sites": [term["sites"][at]]} for term in output["terms"]]}
            for output in coefficients["outputs"]
        ]
        effects["coefficients"] = coefficients | {"outputs": outputs, "site": site}
    columns = [
        each | {"sites": {k: v for k, v in each["sites"].items() if k == site}}
        for each in effects["importance"]["columns"]
    ]
    effects["importance"] = effects["importance"] | {"columns": columns}
    effects["curves"] = [
        curve | {"sites": {k: v for k, v in curve["sites"].items() if k == site}} for curve in effects["curves"]
    ]
    return effects
