"""A client's mixture of several models' predictions, and its label prior as a shift of the head's bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.algorithms._shared.own_loss import without_prefix
from fedtailor.core.context import ClientContext
from fedtailor.core.model import Model
from fedtailor.core.segmentation import VOID, class_scores
from fedtailor.core.trees import Params

# under which name the weights stand tells what is mixed
CLASSES, NUMBERS, MASKS = "mixture.of_classes", "mixture.of_numbers", "mixture.of_masks"
NAMES = {"regression": NUMBERS, "segmentation": MASKS}  # by kind of target; else of classes
GRID = 20  # steps of a weight from 0 to 1
FOLDS = 5  # of a client's validation samples
STRENGTHS = (1.0, 5.0, 20.0, 80.0, 320.0, 1e6)  # samples that the opinion of all clients may be worth beside a client's
FIRST = 20.0  # of them, before anything is known


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


def products_of_errors(me: ClientContext, models: Sequence[Params]) -> Tensor:
    """[folds, models, models]: a'qa is the squared error of a mixture a on a fold of the client's validation samples.

    The error of a class is that of its probabilities (Brier's score), which is bounded: no sample rules a model out.
    """
    x, y, mask = me.val
    if not len(y):
        return me.n.new_zeros(FOLDS, len(models), len(models))
    outputs = [me.model(me.buffers | model, x) for model in models]
    if me.experiment.task.kind == "segmentation":
        wrong = _wrong_pixels(torch.stack([class_scores(o).softmax(1) for o in outputs]), y) * mask[:, None]
        return torch.einsum("fn,anc,bnc->fab", folds(mask), wrong, wrong)
    known = torch.stack(outputs)
    if me.experiment.task.kind == "classification":
        known = known.softmax(-1)
        y = y[:, None] == torch.arange(known.shape[-1], device=y.device)
    wrong = (known - y.to(known.dtype)) * mask[:, None]
    return torch.einsum("fn,anc,bnc->fab", folds(mask), wrong, wrong)


def _wrong_pixels(found: Tensor, y: Tensor) -> Tensor:
    """[models, images, all numbers]: errors of probabilities [models, images, classes, ...], whose squares add up to
    the mean over the pixels."""
    numbers = torch.arange(found.shape[2], device=y.device).reshape(-1, *[1] * (y.dim() - 1))
    counts = (y != VOID).to(found.dtype)
    share = counts / counts.flatten(1).sum(1).clamp(min=1).reshape(-1, *[1] * (y.dim() - 1))
    return ((found - (y[:, None] == numbers).to(found.dtype)) * share.sqrt()[:, None]).flatten(2)


def folds(mask: Tensor) -> Tensor:
    """[folds, samples]: 1 where a sample belongs to the fold."""
    numbers = torch.arange(FOLDS, device=mask.device)
    return (torch.arange(len(mask), device=mask.device) % FOLDS == numbers[:, None]) * mask


def held_out(me: ClientContext, q: Tensor, m: Tensor) -> Tensor:
    """For each of `STRENGTHS` the squared error of each fold with the mixture that the client's other folds ask for."""
    each = folds(me.val.mask).sum(1)
    others = (each.sum() - each).clamp(min=1)
    strength = q.new_tensor(STRENGTHS)[:, None] / others
    a = least(q.sum(0) - q, m, strength)
    return torch.einsum("sfa,fab,sfb->s", a, q, a)


def weights(me: ClientContext, models: Sequence[Params], m: Tensor, strength: Tensor) -> Params:
    """What each model counts for a client: its validation samples decide, with `strength` more that say m."""
    a = least(products_of_errors(me, models).sum(0), m, strength / me.val.mask.sum().clamp(min=1))
    return {NAMES.get(me.experiment.task.kind, CLASSES): a}


def least(q: Tensor, m: Tensor, strength: Tensor | float) -> Tensor:
    """The mixture of three models on a grid with the least a'qa + strength (a - m)'q(a - m); m where q says nothing.

    Samples more by that factor, such as these are on average, would add the second part if m foretold them.
    """
    grid = m.new_tensor([(i, j, GRID - i - j) for i in range(GRID + 1) for j in range(GRID + 1 - i)]) / GRID
    strength = torch.as_tensor(strength, dtype=m.dtype, device=m.device)
    own, apart = (((g @ q) * g).sum(-1) for g in (grid, grid - m))
    best = grid[(own + strength[..., None] * apart).argmin(-1, keepdim=True)].squeeze(-2)
    return torch.where((q.diagonal(dim1=-2, dim2=-1).sum(-1) > 0)[..., None], best, m)


def predict(model: Model, personal: Params, x: Tensor, others: Sequence[str]) -> Tensor:
    """Log probabilities, or numbers, of the mixture of a model and those beside it."""
    known = {k: v for k, v in personal.items() if k in model.params or k in model.private_buffers}
    each = [model(known | (without_prefix(name, personal) if name else {}), x) for name in ("", *others)]
    if MASKS in personal:
        logs = torch.stack([class_scores(outputs).log_softmax(1) for outputs in each])
        return (personal[MASKS].log().reshape(-1, *[1] * (logs.dim() - 1)) + logs).logsumexp(0)
    outputs = torch.stack(each)
    if NUMBERS in personal:
        return torch.tensordot(personal[NUMBERS], outputs, dims=1)
    return (personal[CLASSES].log()[:, None, None] + outputs.log_softmax(-1)).logsumexp(0)
