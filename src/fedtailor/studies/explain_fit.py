"""What the folder of a fit says of its models; of one that does not say it yet, it is computed and kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.samples import FederatedData, Rows
from fedtailor.errors import RunError, nearest
from fedtailor.experiments.building import task_of
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.store import FIT, RunFolder, read_json, write_json
from fedtailor.metrics.library import find
from fedtailor.serving.described import part_of
from fedtailor.serving.personal import Personal, personal
from fedtailor.studies.effect_words import words_of
from fedtailor.studies.effects import EFFECTS, of_predictions
from fedtailor.studies.update import rows_of_update


def explain_fit(path: Path, site: str = "", data_root: Path | None = None) -> dict[str, Any]:
    """Coefficients, importance, curves and words; of one site only if it is named."""
    record = read_json(path / FIT)
    if "sites" not in record:
        raise RunError(f"{path}: not finished yet; continue with the same fedtailor fit and --out")
    if site and site not in record["sites"]:
        raise RunError(f'{path}: no site "{site}"; {nearest(site, record["sites"])}')
    if (path / EFFECTS).exists():
        effects = dict(read_json(path / EFFECTS))
    else:
        effects = _computed(path, record, data_root)
        write_json(path / EFFECTS, effects)
    served = {name: row["served"] for name, row in record["sites"].items() if site in ("", name)}
    effects |= {"words": words_of(effects), "target": record["target"], "served": served}
    return _of_site(effects, site) if site else effects


def coefficient_rows(effects: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for every term, common (site is None) and of each site, per unit of its column."""
    found, out = effects["coefficients"], []
    for output in found["outputs"] if found else []:
        for term in output["terms"]:
            factor = term["sd"] or 1.0
            for site, each in ((None, term), *zip(found["sites"], term["sites"], strict=True)):
                numbers = {k: None if each[k] is None else each[k] / factor for k in ("value", "low", "high")}
                named = {"term": term["name"], "reference": term["reference"], "class": output["class"]}
                out.append({"site": site} | named | numbers)
    return out


def _computed(path: Path, record: dict[str, Any], data_root: Path | None) -> dict[str, Any]:
    """What serves the sites, asked about their rows: importance and curves, no coefficients."""
    folder = RunFolder.open(part_of(path, next(iter(record["sites"].values()))["run"]))
    experiment = reload_experiment(folder, data_root, rows_of_update(path, folder) if "update" in record else None)
    data = experiment.data
    if not data.is_plain or len(data.shape) != 1 or data.task not in ("classification", "regression", "count"):
        raise RunError(f"{path}: not a fit of tables; explain one of its runs, such as {folder.path}")

    @cache
    def model(site: str) -> Personal:
        return personal(path, site, data_root)

    def predict(rows: Rows) -> Tensor:
        parts = [
            model(site).outputs(rows.of(i)[0].to(experiment.model.dtype)).double()
            for i, site in enumerate(data.clients)
            if int(rows.sizes[i])
        ]
        return torch.cat(parts)

    metric = find(task_of(folder.config, data), record["metric"])
    return {"coefficients": None, **of_predictions(predict, _doubles(data), metric, folder.config.seed)}


def _doubles(data: FederatedData) -> FederatedData:
    return data.to(torch.float64)


def _of_site(effects: dict[str, Any], site: str) -> dict[str, Any]:
    """Beside what is common, what one site has."""
    found = effects["coefficients"]
    if found:
        at = list(found["sites"]).index(site)
        outputs = [
            output | {"terms": [term | {"sites": [term["sites"][at]]} for term in output["terms"]]}
            for output in found["outputs"]
        ]
        effects["coefficients"] = found | {"outputs": outputs, "site": site}
    columns = [
        each | {"sites": {k: v for k, v in each["sites"].items() if k == site}}
        for each in effects["importance"]["columns"]
    ]
    effects["importance"] = effects["importance"] | {"columns": columns}
    effects["curves"] = [
        curve | {"sites": {k: v for k, v in curve["sites"].items() if k == site}} for curve in effects["curves"]
    ]
    return effects
