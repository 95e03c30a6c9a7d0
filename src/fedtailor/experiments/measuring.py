"""Metrics of all clients, on the splits that are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fedtailor.core.engine import Engine
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Params, Tree


def missing_metrics(experiment: Experiment, test: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Which clients with test samples have no number of a metric, and why."""
    sizes, names = experiment.data.test.sizes.tolist(), experiment.data.clients
    out = {}
    for metric in experiment.metrics:
        without = [c for c, v, n in zip(names, test[metric.name], sizes, strict=True) if n and math.isnan(v)]
        if without:
            out[metric.name] = {"clients": without, "reason": metric.missing}
    return out


def measure(
    engine: Engine,
    round: int,
    server: Tree,
    splits: list[str],
    keep: Callable[[int, Params], None] = lambda client, model: None,
    kind: str = "",
) -> dict[str, dict[str, list[float]]]:
    """Per split and metric one number per client, in the order of the data's clients; `keep` is given the models."""
    clients = len(engine.experiment.data.clients)
    names = [metric.name for metric in engine.experiment.metrics]
    out = {s: {name: [math.nan] * clients for name in names} for s in splits}  # not a number: it did not answer
    for group, by_split, stack in engine.evaluate(range(clients), round, server, splits, kind):
        for split, metrics in by_split.items():
            for name, values in metrics.items():
                for client, value in zip(group, values.tolist(), strict=True):
                    out[split][name][client] = value
        for row, client in enumerate(group if stack else ()):  # the models of other ranks and of sites are there
            keep(client, {k: v[row] for k, v in stack.items()})
    return out
