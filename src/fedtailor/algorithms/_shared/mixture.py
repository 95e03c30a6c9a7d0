"""A client's mixture of several models' predictions, and its label prior as a shift of the head's bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.algorithms._shared.own_loss import taken, task_losses
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.trees import Params

CLASSES, NUMBERS = "mixture.of_classes", "mixture.of_numbers"  # under which name the weights stand tells what is mixed
STEPS, GRID = 50, 40  # of EM; of a weight
STRENGTH = 10.0  # samples that the opinion of all clients is worth beside a client's own


def label_shift(me: ClientContext) -> Params:
    """log of the client's label frequencies, for the head's bias; nothing for numbers or a head without a bias."""
    biases = [k for k, v in me.model.head.items() if v.dim() == 1]
    _, y, mask = me.train
    if me.experiment.task.kind != "classification" or not biases:
        return {}
    like = me.model.head[biases[-1]]
    classes = torch.arange(len(like), device=like.device)
    counts = ((y[:, None] == classes) * mask[:, None]).sum(0).to(like.dtype)
    return {biases[-1]: ((counts + 0.5) / (counts + 0.5).sum()).log()}


def weights(me: ClientContext, models: Sequence[Params], m: Tensor) -> Params:
    """What each model counts for a client: its validation samples decide, with `STRENGTH` more that say m."""
    counts = votes(me, models, m)
    if me.experiment.task.kind == "regression":  # has looked at m already
        return {NUMBERS: torch.where(counts.sum() > 0, counts / counts.sum().clamp(min=1), m)}
    return {CLASSES: (counts + STRENGTH * m) / (counts.sum() + STRENGTH)}


def shared(votes: Tensor) -> Tensor:
    """m after the votes of all clients, one of which is for an even mixture."""
    even = votes.new_full(votes.shape, 1 / len(votes))
    return (votes + even) / (votes + even).sum()


def votes(me: ClientContext, models: Sequence[Params], m: Tensor) -> Tensor:
    """How many of a client's validation samples each model explains."""
    x, y, mask = me.val
    if not len(y):
        return torch.zeros_like(m)
    if me.experiment.task.kind == "regression":
        outputs = torch.stack([me.model(me.buffers | model, x) for model in models])
        return mask.sum() * least_squares(outputs, y, mask, m)
    losses = torch.stack([task_losses(me, me.buffers | model, x, y) for model in models])  # [models, samples]
    return most_probable(losses, mask, m)


def most_probable(losses: Tensor, mask: Tensor, m: Tensor) -> Tensor:
    """Samples by the model that they come from, in the mixture that makes them most probable; by EM."""
    likelihood = (losses.min(0).values - losses).exp()
    counts, pi = torch.zeros_like(m), m
    for _ in range(STEPS):
        each = pi[:, None] * likelihood
        counts = (each / each.sum(0) * mask).sum(1)
        pi = (counts + STRENGTH * m) / (counts + STRENGTH * m).sum()
    return counts


def least_squares(outputs: Tensor, y: Tensor, mask: Tensor, m: Tensor) -> Tensor:
    """The mixture of numbers [models, samples, columns] that is nearest to y, on a grid over all mixtures.

    `STRENGTH` samples more are such as these are on average, with numbers as m foretells them.
    """
    count = mask.sum().clamp(min=1)
    wrong = ((outputs - y) * mask[:, None]).flatten(1)
    q = wrong @ wrong.T / count  # a'qa is the squared error of a mixture a
    grid = m.new_tensor([(i, j, GRID - i - j) for i in range(GRID + 1) for j in range(GRID + 1 - i)]) / GRID
    apart = grid - m
    cost = ((grid @ q) * grid).sum(1) + STRENGTH / count * ((apart @ q) * apart).sum(1)
    return grid[cost.argmin(0, keepdim=True)][0]


def predict(model: Model, personal: Params, x: Tensor, others: Sequence[str]) -> Tensor:
    """Log probabilities, or numbers, of the mixture of a model and those beside it."""
    known = {k: v for k, v in personal.items() if k in model.params or k in model.private_buffers}
    outputs = torch.stack([model(known | (taken(name, personal) if name else {}), x) for name in ("", *others)])
    if NUMBERS in personal:
        return torch.tensordot(personal[NUMBERS], outputs, dims=1)
    return (personal[CLASSES].log()[:, None, None] + outputs.log_softmax(-1)).logsumexp(0)
