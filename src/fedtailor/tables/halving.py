"""Fits of other data than tables: candidates are compared by successive halving on validation data.

Half of the candidates are dropped at each budget, the others go on from their checkpoints. Then each site gets the
model that serves it best. Every site alone and one common model run to the end as references.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtailor import algorithms
from fedtailor.core.data import FederatedData
from fedtailor.core.task import HIGHER_IS_BETTER, METRICS
from fedtailor.errors import ClientError, ConfigError, UserError
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import RunFolder
from fedtailor.metrics.summary import share_hurt, summarise
from fedtailor.studies.grid import Cell, CellListener, folder_name, start_or_resume
from fedtailor.tables.fit_record import sharing_record
from fedtailor.tables.fit_sources import read_source
from fedtailor.tables.model_selection import CAUTION, Floats, Gain, ScoreView, choose
from fedtailor.tables.serve import Personal

ALONE, COMMON = "local", "fedavg"
KIND = "last"  # round; choosing the best one on validation data would flatter those that vary most
NETWORK: tuple[dict[str, Any], ...] = (
    {"name": "fedavg+ft"},
    {"name": "fedper"},
    {"name": "fedrep", "head_epochs": 2},
    {"name": "ditto", "lam": 0.1},
    {"name": "learn2pfed-net"},
    {"name": "fedselect"},
)
LINEAR_CLASSES: tuple[dict[str, Any], ...] = (  # a linear model has no body under its head
    {"name": "fedavg+ft"},
    {"name": "ditto", "lam": 0.1},
    {"name": "learn2pfed-net"},
    {"name": "fedselect"},
)
FEW_ROWS = 20  # of the median site, below which a network would be too much for the sites
BODY_AND_HEAD = ("fedper", "fedrep", "fedbabu", "lg-fedavg", "fedpac", "fedeq", "knn-per")  # share one of the two
LINEAR_NUMBERS: tuple[dict[str, Any], ...] = (
    {"name": "fedavg+ft"},
    {"name": "ditto", "lam": 0.1},
    {"name": "learn2pfed"},
    {"name": "empiricalbayes"},
)


@dataclass(frozen=True)
class HalvingPlan:
    """The runs: references to the end, candidates while they are in the better half."""

    algorithm: str
    alone: Cell
    common: Cell
    candidates: list[Cell]
    budgets: list[int]  # rounds after which half of the candidates are dropped
    data: FederatedData

    @property
    def cells(self) -> list[Cell]:
        return [self.alone, self.common, *self.candidates]


def plan(
    source: Mapping[str, Any], out: Path, *, algorithm: str = "auto", data_root: Path | None = None, **options: Any
) -> HalvingPlan:
    """Read the data, fill in defaults, and check every run before the first one begins; options: of `read_source`."""
    tables, loaded = read_source(source, algorithm=algorithm, data_root=data_root, **options)
    if not len(loaded.val.x):
        raise ConfigError(f"{loaded.name}: no site has validation samples, by which models are chosen; raise data.val")
    tables = fill_defaults(tables, loaded, algorithm)
    own = dict(tables.pop("algorithm", {}))
    wanted = candidates_for(parse(tables).model.name, loaded) if algorithm == "auto" else [own | {"name": algorithm}]
    alone, common = (_cell(tables, {"name": name}, out) for name in (ALONE, COMMON))
    if len(loaded.clients) == 1:  # no other site
        return HalvingPlan(ALONE, alone, alone, [], [], loaded)
    others = [_cell(tables, table, out) for table in wanted if table["name"] not in (ALONE, COMMON) or len(table) > 1]
    for cell in (alone, common, *others):
        build_experiment(cell.config, data_root, loaded)
    every, total = alone.config.evaluation.every, alone.config.rounds
    budgets = sorted({max(every, total * part // 4 // every * every) for part in (1, 2)} - {total})
    return HalvingPlan(algorithm, alone, common, others, budgets if algorithm == "auto" else [], loaded)


def fill_defaults(tables: dict[str, Any], loaded: FederatedData, algorithm: str = "auto") -> dict[str, Any]:
    """Fill in model, step size and batch size to suit the data."""
    rows, inputs, largest = len(loaded.train.x), math.prod(loaded.shape), int(loaded.train.sizes.max())
    usual = float(loaded.train.sizes.double().median())
    model: dict[str, Any]
    if len(loaded.shape) == 3:
        model = {"name": "lenet5" if loaded.shape[0] == 3 else "fmnist-cnn"}
    elif (rows < 30 * inputs or usual < FEW_ROWS or inputs == 1) and algorithm.lower() not in BODY_AND_HEAD:
        model = {"name": "linear"}
    else:
        model = {"name": "mlp", "hidden": [32] if rows < 10_000 else [64, 64]}
    model_table = tables.get("model", {})
    model = model | model_table if model_table.get("name", model["name"]) == model["name"] else dict(model_table)
    batch = 16 if largest < 1000 else 32 if largest < 10_000 else 256
    local = {"lr": 0.05, "batch_size": batch, "clip": 10.0} | tables.get("local", {})
    every = {"every": max(1, int(tables["rounds"]) // 8)} | tables.get("evaluation", {})
    return tables | {"model": model, "local": local, "evaluation": every}


def candidates_for(model: str, loaded: FederatedData) -> list[dict[str, Any]]:
    if model != "linear":
        return [dict(table) for table in NETWORK]
    return [dict(table) for table in (LINEAR_NUMBERS if loaded.task == "regression" else LINEAR_CLASSES)]


def _cell(tables: dict[str, Any], algorithm: dict[str, Any], out: Path) -> Cell:
    program = algorithms.make(str(algorithm["name"]), {k: v for k, v in algorithm.items() if k != "name"})
    title = program.title or type(program).__name__
    config: RunConfig = parse(tables | {"algorithm": algorithm}, origin="fit")
    return Cell(title, config.seed, out / folder_name(title, config.seed), config)


def run_plan(
    fit_plan: HalvingPlan, data_root: Path | None, listener: CellListener
) -> tuple[list[Cell], list[dict[str, Any]]]:
    """Run references and candidates; returns the finished cells, and the dropped ones with the reason."""

    for cell in (fit_plan.alone, fit_plan.common):
        start_or_resume(cell, data_root, listener, loaded=fit_plan.data)
    alive, dropped = list(fit_plan.candidates), []
    for until in (*fit_plan.budgets, None):
        for cell in list(alive):
            try:
                start_or_resume(cell, data_root, listener, loaded=fit_plan.data, until=until)
            except (UserError, ClientError) as error:
                if fit_plan.algorithm != "auto":
                    raise
                alive.remove(cell)
                dropped.append({"label": cell.label, "round": 0, "val": None, "why": str(error)})
        if until is not None and len(alive) > 1:
            ranked = sorted(alive, key=lambda cell: best_validation(cell, until), reverse=True)
            better_half = ranked[: -(-len(ranked) // 2)]
            for cell in ranked[len(better_half) :]:
                value = abs(best_validation(cell, until)[0])
                dropped.append({"label": cell.label, "round": until, "val": value, "why": "the other half is better"})
            alive = [cell for cell in alive if cell in better_half]
    return [fit_plan.alone, fit_plan.common, *alive], dropped


def best_validation(cell: Cell, until: int) -> tuple[float, float]:
    """The best validation metrics of a run so far; higher is better."""
    folder = RunFolder(cell.folder)
    metric, *others = METRICS[folder.about["task"]]
    scores = []
    for line in folder.metrics():
        if "val" in line and line["round"] <= until:
            means = {m: summarise(line["val"][m], higher_is_better=True).mean for m in (metric, *others)}
            signed = [means[m] if HIGHER_IS_BETTER[m] else -means[m] for m in (metric, *others)]
            scores.append((signed[0], signed[1]))
    fine = [pair for pair in scores if all(map(math.isfinite, pair))]
    return max(fine, default=(-math.inf, -math.inf))


def validation_scores(cell: Cell, loaded: FederatedData) -> dict[str, list[Floats]]:
    """For each site one score per validation sample of its model: right or not, and minus its squared error."""
    folder = RunFolder(cell.folder)
    setting = build_experiment(cell.config, None, loaded)
    names = ("metric", "error") if loaded.task == "classification" else ("error",)
    out: dict[str, list[Floats]] = {name: [] for name in names}
    for i, site in enumerate(loaded.clients):
        x, y = setting.data.val.of(i)
        own = Personal(site, setting.algorithm, setting.model, folder.personal(site, KIND), loaded.task)
        outputs = own.outputs(x) if len(x) else y.new_zeros((0, loaded.outputs), dtype=setting.model.dtype)
        if "metric" in out:
            out["metric"].append((outputs.argmax(1) == y).double().numpy())
            wanted = torch.nn.functional.one_hot(y, loaded.outputs)
            outputs, y = outputs.softmax(1), wanted
        error = setting.loss(outputs, y) if loaded.task == "count" else (outputs - y).double().square().sum(1)
        out["error"].append(-error.double().numpy())
    return out


def choose_models(fit_plan: HalvingPlan, finished: Sequence[Cell]) -> dict[str, Any]:
    """The record: the model of each site, estimated gains, and test figures."""
    scores = {cell.label: validation_scores(cell, fit_plan.data) for cell in finished}
    by_label = {cell.label: cell for cell in finished}
    names = list(scores[fit_plan.alone.label])
    is_bounded = fit_plan.data.task == "classification"
    views = [ScoreView({label: s[name] for label, s in scores.items()}, CAUTION[name], is_bounded) for name in names]
    labels, estimates = choose(views, fit_plan.alone.label)
    first_gains = estimates[0]
    if fit_plan.algorithm != "auto":
        labels = [(fit_plan.candidates[0] if fit_plan.candidates else _reference(fit_plan)).label] * len(labels)
    metric = METRICS[fit_plan.data.task][0]
    figures = {label: _test_figures(cell, metric) for label, cell in by_label.items()}
    unit = fit_plan.data.preparation.target.sd if fit_plan.data.preparation is not None and metric == "rmse" else 1.0
    sites: dict[str, dict[str, Any]] = {}
    for i, (site, label) in enumerate(zip(fit_plan.data.clients, labels, strict=True)):
        sites[site] = {
            "run": by_label[label].folder.name,
            "served": label,
            "train": int(fit_plan.data.train.sizes[i]),
            "val": int(fit_plan.data.val.sizes[i]),
            "test": int(fit_plan.data.test.sizes[i]),
            "alone": figures[fit_plan.alone.label][i] * unit,
            "common": figures[fit_plan.common.label][i] * unit,
            "personal": figures[label][i] * unit,
            "gains": {name: _site_gains(gain, i) for name, gain in zip(names, estimates, strict=True)},
        }
    shared_labels = [label for label in first_gains if label in labels] or list(first_gains)
    best = max(shared_labels, key=lambda label: sum(g.mean for g in first_gains[label]), default=fit_plan.alone.label)
    higher = HIGHER_IS_BETTER[metric]
    return {
        "kind": KIND,
        "metric": metric,
        "higher_is_better": higher,
        "task": fit_plan.data.task,
        "data": fit_plan.data.name,
        "model": fit_plan.alone.config.model.name,
        "rounds": fit_plan.alone.config.rounds,
        "target": fit_plan.data.preparation.target.name if fit_plan.data.preparation is not None else "",
        "sites": sites,
        "newcomers": by_label[best].folder.name,
        "shared": {label: sharing_record(by_label[label]) for label in dict.fromkeys([*labels, fit_plan.common.label])},
        "means": {
            "alone": summarise([s["alone"] for s in sites.values()], higher_is_better=higher).mean,
            "common": summarise([s["common"] for s in sites.values()], higher_is_better=higher).mean,
            "personal": summarise([s["personal"] for s in sites.values()], higher_is_better=higher).mean,
        },
        "hurt": share_hurt(
            [s["personal"] for s in sites.values()], [s["alone"] for s in sites.values()], higher_is_better=higher
        ),
        "notes": list(fit_plan.data.notes),
    }


def _site_gains(gains: Mapping[str, Sequence[Gain]], site: int) -> dict[str, Any]:
    """Estimated gains over training alone on validation data, by algorithm."""
    return {
        label: {"mean": each[site].mean, "sd": each[site].sd}
        for label, each in gains.items()
        if math.isfinite(each[site].sd) and math.isfinite(each[site].mean)
    }


def _reference(fit_plan: HalvingPlan) -> Cell:
    return fit_plan.common if fit_plan.algorithm.lower() == COMMON else fit_plan.alone


def _test_figures(cell: Cell, metric: str) -> list[float]:
    results = RunFolder(cell.folder).results
    assert results is not None
    return list(results[KIND]["clients"][metric])
