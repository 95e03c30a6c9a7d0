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
STEPS = 20  # of EM
PSEUDO = (8.0, 1.0, 1.0)  # samples that speak for each model before any is seen: the first is the one to leave last


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


def weights(me: ClientContext, models: Sequence[Params]) -> Params:
    """What each model counts: the mixture that makes the validation samples most probable, by EM, with `PSEUDO` more.

    The error of a number is taken as Gaussian, with the variance that the best model has.
    """
    x, y, mask = me.val
    pseudo = me.n.new_tensor(PSEUDO)
    is_regression = me.experiment.task.kind == "regression"
    name = NUMBERS if is_regression else CLASSES
    if not len(y):
        return {name: pseudo / pseudo.sum()}
    losses = torch.stack([task_losses(me, me.buffers | m, x, y) for m in models])  # [models, samples]
    if is_regression:
        variance = ((losses * mask).sum(1) / mask.sum().clamp(min=1)).min().clamp(min=1e-12)
        losses = losses / (2 * variance)
    likelihood = (losses.min(0).values - losses).exp()
    pi = pseudo / pseudo.sum()
    for _ in range(STEPS):
        each = pi[:, None] * likelihood
        counts = (each / each.sum(0) * mask).sum(1) + pseudo
        pi = counts / counts.sum()
    return {name: pi}


def predict(model: Model, personal: Params, x: Tensor, others: Sequence[str]) -> Tensor:
    """Log probabilities, or numbers, of the mixture of a model and those beside it."""
    known = {k: v for k, v in personal.items() if k in model.params or k in model.private_buffers}
    outputs = torch.stack([model(known | (taken(name, personal) if name else {}), x) for name in ("", *others)])
    if NUMBERS in personal:
        return torch.tensordot(personal[NUMBERS], outputs, dims=1)
    return (personal[CLASSES].log()[:, None, None] + outputs.log_softmax(-1)).logsumexp(0)
