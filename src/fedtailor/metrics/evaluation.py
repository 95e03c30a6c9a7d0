"""Metrics of personal models on their clients' samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.core.context import AT_ONCE
from fedtailor.core.data import Rows, take
from fedtailor.core.engine import Metrics
from fedtailor.core.experiment import Experiment
from fedtailor.core.random import seeded, undrawn
from fedtailor.core.task import Metric
from fedtailor.core.trees import Params, Tree, leaves, tree_map, wide, widest
from fedtailor.errors import RunError
from fedtailor.training.batches import Batch, on_device, send_samples, whole

LARGE = 16 * 2**20  # bytes of samples in a pass
OUTPUTS = 32 * 2**20  # bytes of outputs in a pass


def evaluate(
    experiment: Experiment,
    members: Sequence[int],
    model: Params,
    splits: Sequence[str],
    *,
    is_stacked: bool,
    batch: int = 0,
) -> Metrics:
    """Per split and metric the value of each member; NaN where it has no samples or the metric is undefined."""
    out: Metrics = {}
    experiment = experiment.at(members[0])
    chosen = batch or experiment.evaluation_batch
    for split in splits:
        rows: Rows = getattr(experiment.data, split)
        batch = chosen or _at_once(experiment, rows, len(members))
        starts, sizes = rows.bounds(members)
        zeros = experiment.model.like.new_zeros(len(members), dtype=widest(experiment.device))
        totals = {m.name: zeros.clone() for m in experiment.metrics if m.per_sample}
        weights = {m.name: zeros.clone() for m in experiment.metrics if m.weight}
        kept: list[tuple[Tree, Tensor, Tensor]] = []  # outputs, targets and which of them count
        for part in on_device(whole(starts, sizes, batch, experiment.model.dtype), experiment.device, rows.home):
            outputs, y, counts = _outputs(experiment, members, model, rows, split, part, is_stacked=is_stacked)
            if len(totals) < len(experiment.metrics):
                kept.append((outputs, y, counts))
            flat, targets = tree_map(lambda v: v.flatten(0, 1), outputs), y.flatten(0, 1)
            for metric in experiment.metrics:
                if metric.per_sample is not None:
                    values = wide(metric.per_sample(flat, targets).reshape(counts.shape))
                    totals[metric.name] += torch.where(counts, values, 0.0).sum(1)  # an error without limit, too
                if metric.weight is not None:
                    parts = wide(metric.weight(targets).reshape(counts.shape))
                    weights[metric.name] += torch.where(counts, parts, 0.0).sum(1)
            del outputs, flat  # or they are there beside the next ones
        samples = zeros.new_tensor(sizes)
        out[split] = {
            m.name: _mean(m, totals[m.name], weights.get(m.name, samples))
            if m.per_sample
            else _of_all(experiment, m, members, kept)
            for m in experiment.metrics
        }
    return out


def _at_once(experiment: Experiment, rows: Rows, clients: int) -> int:
    """Samples of a pass: few where they, or what the model gives for them, are large."""
    known, size = (sum(v.nbytes for v in leaves(each.first(1))) for each in (experiment.data.train, rows))
    outputs = experiment.output_size * max(1, size // max(known, 1))  # images may be larger than in training
    return max(1, min(AT_ONCE, LARGE // max(size, 1), OUTPUTS // max(outputs * clients, 1)))


def _outputs(
    experiment: Experiment,
    members: Sequence[int],
    model: Params,
    rows: Rows,
    split: str,
    part: Batch,
    *,
    is_stacked: bool,
) -> tuple[Tree, Tensor, Tensor]:
    """What the models say of a part of a split, stacked; its targets; and which of them are not padding."""

    def predict(model: Params, x: Tree) -> Tree:
        return experiment.predict(model, x)

    at = part.rows.clamp(max=len(rows.y) - 1)
    x, y = send_samples((take(rows.x, at), take(rows.y, at)), experiment.device)
    every = experiment.model.like.new_ones(at.shape, dtype=torch.bool)
    counts = every if part.weight is None else part.weight > 0
    with torch.no_grad():
        if is_stacked:
            with undrawn(experiment.device):
                return torch.func.vmap(predict)(model, x), y, counts
        key = (experiment.seed, "evaluate", experiment.data.clients[members[0]], split)
        with seeded(*key, device=experiment.device):
            outputs = predict(model, tree_map(lambda v: v[0], x))
        return tree_map(lambda v: v[None], outputs), y, counts


def _mean(metric: Metric, totals: Tensor, samples: Tensor) -> Tensor:
    means = totals / samples
    finished = means if metric.finish is None else metric.finish(means)
    return torch.where(samples > 0, finished, torch.nan)  # 0 / 0 has a sign, which depends on the machine


def _of_all(
    experiment: Experiment, metric: Metric, members: Sequence[int], kept: Sequence[tuple[Tree, Tensor, Tensor]]
) -> Tensor:
    """A metric of all outputs of a split, client by client."""
    assert metric.of_all is not None
    values = torch.full((len(members),), torch.nan, dtype=torch.float64, device="cpu")
    for i, member in enumerate(members):
        parts = [(tree_map(lambda v, i=i, c=c: v[i][c[i]], out), y[i][c[i]]) for out, y, c in kept]
        if not sum(len(y) for _, y in parts):
            continue
        outputs = tree_map(lambda *each: torch.cat(each), *(out for out, _ in parts))
        if not all(bool(v.isfinite().all()) for v in leaves(outputs)):
            values[i] = metric.worst
            continue
        try:
            values[i] = float(metric.of_all(tree_map(Tensor.cpu, outputs), torch.cat([y for _, y in parts]).cpu()))
        except Exception as error:
            client = experiment.data.clients[member]
            raise RunError(f'evaluation.metrics: "{metric.name}" failed at client {client}: {error}') from error
    return values.to(experiment.device, widest(experiment.device))
