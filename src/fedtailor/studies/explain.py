"""What is shared: the degree to which each client's parameters are the common ones, as the run learned it."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import get_args, get_type_hints

import torch
from torch import Tensor

from fedtailor.core.client import personal, shares
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Params, Tree, flat, tree_map
from fedtailor.data.files import escape_formula
from fedtailor.errors import RunError
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.store import RunFolder, write_atomically, write_json, write_tree
from fedtailor.metrics.evaluation import evaluate
from fedtailor.numerics.masks import overlap

SHARES, WEIGHTS = "shares.safetensors", "weights.csv"


Table = dict[str, dict[str, float]]  # client -> part -> number


def explain(path: Path, data_root: Path | None = None) -> tuple[list[str], Table, Table]:
    """Names of the parts and, per client, the share of each (0 is own, 1 is common) and its effective degree.

    Degrees are empty where the algorithm has none. A part is a feature of a linear model, else a layer (mean share,
    geometric mean of the degrees). Saved in the run's folder too, for every parameter; and, where parameters are either
    own or common, how much the own ones of every two clients overlap in each layer.
    """
    experiment, by_client = _shares(path, data_root)
    each = list(by_client.values())
    stack = [{k: torch.stack([one[kind][k] for one in each]) for k in each[0][kind]} for kind in (0, 1)]
    entry = write_tree(path / SHARES, {"shares": stack[0], "degrees": stack[1], "overlap": overlaps(stack[0])})
    table = {c: parts(experiment, own) for c, (own, _) in by_client.items()}
    degrees = {}
    if each[0][1]:
        logs = {c: parts(experiment, {k: v.log() for k, v in own.items()}) for c, (_, own) in by_client.items()}
        degrees = {c: {k: math.exp(v) if v < 700 else math.inf for k, v in row.items()} for c, row in logs.items()}
    write_json(path / "shares.json", {"tensors": entry, "clients": table, "degrees": degrees})
    return list(next(iter(table.values()))), table, degrees


def _shares(path: Path, data_root: Path | None) -> tuple[Experiment, dict[str, tuple[Params, Params]]]:
    """Of every client the share and the effective degree of each parameter."""
    experiment, state = _reload(path, data_root)
    by_client: dict[str, tuple[Params, Params]] = {}
    for i, client in enumerate(experiment.data.clients):
        own = tree_map(lambda v, i=i: v[i], state["clients"])
        by_client[client] = shares(experiment, i, own["state"], own["buffers"], state["server"])
    return experiment, by_client


def _reload(path: Path, data_root: Path | None) -> tuple[Experiment, Tree]:
    """An experiment and its last state, of the server and the clients."""
    folder = RunFolder.open(path)
    saved = folder.load_checkpoint()
    if saved is None:
        raise RunError(f"{path}: has no checkpoint yet; nothing was learned")
    return reload_experiment(folder, data_root), saved[1]["state"]


def of_own_models(path: Path, metric: str, data_root: Path | None = None) -> float:
    """A test metric, mean over clients, where each is served by its own model of before the last average.

    Not a number for a method that has no such model.
    """
    experiment, state = _reload(path, data_root)
    if "own" not in get_args(get_type_hints(type(experiment.algorithm)).get("serve")):
        return math.nan
    experiment, values = replace(experiment, algorithm=replace(experiment.algorithm, serve="own")), []  # type: ignore[call-arg]
    for i in range(len(experiment.data.clients)):
        mine = tree_map(lambda v, i=i: v[i], state["clients"])
        own = personal(experiment, [i], 0, mine["state"], mine["buffers"], state["server"], is_stacked=False)
        values.append(evaluate(experiment, [i], own, ["test"], is_stacked=False)["test"][metric].item())
    return mean(v for v in values if not math.isnan(v))


def weights(path: Path) -> dict[int, dict[str, float]]:
    """Round -> client -> its weight in the average, where the algorithm tells; saved in the run's folder too."""
    folder = RunFolder.open(path)
    names = folder.about["clients"]
    by_round = {
        line["round"]: {names[c]: w for c, w in zip(line["cohort"], line["report"]["weights"], strict=True)}
        for line in folder.metrics()
        if "weights" in line.get("report", {})
    }
    if by_round:
        file = io.StringIO()
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["round", "client", "weight"])
        rows.writerows(
            [round, escape_formula(client), w] for round, row in by_round.items() for client, w in row.items()
        )
        write_atomically(path / WEIGHTS, file.getvalue().encode())
    return by_round


def overlap_by_classes(path: Path, data_root: Path | None = None, *, head: bool = False) -> dict[str, float]:
    """Mean overlap of the masks of two clients: of pairs with a class in "common", and of pairs with "none".

    With `head`, of the masks of the head.
    """
    experiment, by_client = _shares(path, data_root)
    some = experiment.model.head if head else experiment.model.params
    masks = [flat({k: v for k, v in own.items() if k in some}) == 0 for own, _ in by_client.values()]
    pairs = overlap(torch.stack(masks))
    classes = [set(experiment.data.train.of(i)[1].tolist()) for i in range(len(experiment.data.clients))]
    groups: dict[str, list[float]] = {"common": [], "none": []}
    for i, j in combinations(range(len(classes)), 2):
        groups["common" if classes[i] & classes[j] else "none"].append(float(pairs[i, j]))
    return {name: mean(values) if values else math.nan for name, values in groups.items()}


def overlaps(shares: Params) -> Params:
    """Per layer the intersection over union of what is own, [clients, clients]; nothing where shares are degrees."""
    if not all(bool(((v == 0) | (v == 1)).all()) for v in shares.values()):
        return {}
    layers: dict[str, list[Tensor]] = {}
    for name, v in shares.items():
        layers.setdefault(name.rpartition(".")[0] or name, []).append(v.flatten(1) == 0)
    return {k: overlap(torch.cat(v, 1)) for k, v in layers.items()}


def parts(experiment: Experiment, params: Params) -> dict[str, float]:
    """Means by feature where the model is linear and features have names, else by layer."""
    if experiment.data.features and {v.dim() for v in params.values()} <= {1, 2} and len(params) <= 2:
        named: dict[str, Tensor] = {}
        for v in params.values():
            if v.dim() == 2 and v.shape[1] == len(experiment.data.features):
                named |= dict(zip(experiment.data.features, v.mean(0), strict=True))
            else:
                named["bias"] = v.mean()
        return {k: float(v) for k, v in named.items()}
    layers: dict[str, list[Tensor]] = {}
    for name, v in params.items():
        layers.setdefault(name.rpartition(".")[0] or name, []).append(v.flatten())
    return {k: float(torch.cat(v).mean()) for k, v in layers.items()}
