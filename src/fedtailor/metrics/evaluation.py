"""Metrics of personal models on their clients' samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.core.engine import Metrics
from fedtailor.core.experiment import Experiment
from fedtailor.core.random import seeded, undrawn
from fedtailor.core.task import METRICS, sample_metrics
from fedtailor.core.trees import Params
from fedtailor.training.batches import brought, on_device, whole


def evaluate(
    experiment: Experiment,
    members: Sequence[int],
    model: Params,
    splits: Sequence[str],
    *,
    is_stacked: bool,
    batch: int = 256,
) -> Metrics:
    """Per split and metric the value of each member; not a number where it has no samples."""

    def predict(model: Params, x: Tensor) -> Tensor:
        return experiment.algorithm.predict(experiment.model, model, x)

    task, out = experiment.data.task, {}
    for split in splits:
        rows = getattr(experiment.data, split)
        starts, sizes = rows.bounds(members)
        totals: dict[str, Tensor] = {}
        for part in on_device(whole(starts, sizes, batch, experiment.model.dtype), experiment.device, rows.x.device):
            at = part.rows.clamp(max=len(rows.x) - 1)
            x, y = brought(rows.x[at], experiment.device), brought(rows.y[at], experiment.device)
            weight = experiment.model.like.new_ones(at.shape) if part.weight is None else part.weight
            with torch.no_grad():
                if is_stacked:
                    with undrawn(experiment.device):
                        output = torch.func.vmap(predict)(model, x)
                else:
                    key = (experiment.seed, "evaluate", experiment.data.clients[members[0]], split)
                    with seeded(*key, device=experiment.device):
                        output = predict(model, x[0])[None]
            per_sample = sample_metrics(task, output.flatten(0, 1), y.flatten(0, 1))
            for name, flat in per_sample.items():
                values = flat.reshape(y.shape[:2]).double()
                known = torch.where(weight > 0, values * weight, 0.0)  # an error without limit, too
                totals[name] = totals.get(name, values.new_zeros(len(members))) + known.sum(1)
        count = experiment.model.like.new_tensor(sizes, dtype=torch.float64)
        metrics = {name: total / count for name, total in totals.items()}
        for name in METRICS[task]:
            metrics.setdefault(name, torch.full_like(count, torch.nan))
        if "rmse" in metrics:
            metrics["rmse"] = metrics["rmse"].sqrt()
        out[split] = metrics
    return out
