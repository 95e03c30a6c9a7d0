"""Prototypes: the mean of the features of each class, [classes, features], and a pull of features towards them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtailor.algorithms._shared.heads import check_dense_head, weight_of_head
from fedtailor.algorithms._shared.own_loss import task_losses
from fedtailor.core.algorithm import ReplySpec
from fedtailor.core.context import ClientContext, OwnLoss
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError

SUMS = ReplySpec("class sums", lambda algorithm, model: torch.zeros_like(weight_of_head(model)))
COUNTS = ReplySpec("class counts", lambda algorithm, model: torch.zeros_like(weight_of_head(model)[:, 0]))
PROTOTYPES, IS_KNOWN = "prototypes", "prototypes.is_known"


class ClassSums(NamedTuple):
    """Of a client's training samples, by class."""

    sums: Tensor  # of features
    counts: Tensor
    squares: Tensor  # of the features of all samples

    @property
    def means(self) -> Tensor:
        return self.sums / self.counts.clamp(min=1)[:, None]


def check_classes(model: Model, task: str, title: str) -> None:
    """Raise a `ConfigError` where there are no classes, or no dense layer behind the features."""
    if task != "classification":
        raise ConfigError(f"algorithm.name: {title} compares means of classes; it is for classification, not {task}")
    check_dense_head(model, title)


def no_prototypes(model: Model) -> Params:
    """Before the first round."""
    zero = torch.zeros_like(weight_of_head(model))
    return {PROTOTYPES: zero, IS_KNOWN: zero[:, 0]}


def class_sums(me: ClientContext, params: Params) -> ClassSums:
    """Sums of features by class, under a model."""
    sums, counts, squares = torch.zeros_like(weight_of_head(me.model)), me.n.new_zeros(()), me.n.new_zeros(())
    for x, y, mask in me.train.parts():
        f = me.features(params, x)
        belongs = (y[:, None] == torch.arange(len(sums), device=y.device)) * mask[:, None]
        squares = squares + torch.where(mask > 0, f.square().sum(1), 0).sum()
        sums, counts = sums + belongs.T @ f, counts + belongs.sum(0)
    return ClassSums(sums, counts, squares)


def renew(known: Params, sums: Tensor, counts: Tensor) -> Params:
    """The means of these sums; a class that nobody has now keeps its prototype."""
    there = counts > 0
    means = torch.where(there[:, None], sums / counts.clamp(min=1)[:, None], known[PROTOTYPES])
    return {PROTOTYPES: means, IS_KNOWN: (there | (known[IS_KNOWN] > 0)).to(means.dtype)}


def pulled_losses(me: ClientContext, lam: float) -> OwnLoss:
    """The task's loss and lam times the mean square of the way from a sample's features to its class's prototype."""

    def loss(t: Params, x: Tree, y: Tensor) -> Tensor:
        f, output = me.model.features_and_outputs(t, x, training=True)
        away = (f - t[PROTOTYPES][y]).square().mean(1) * t[IS_KNOWN][y]
        return me.experiment.loss(output, y) + lam * away

    return loss if lam else lambda t, x, y: task_losses(me, of_model(me.model, t), x, y, training=True)


def of_model(model: Model, t: Params) -> Params:
    """Without tensors that the model does not have."""
    return {k: v for k, v in t.items() if k in model.params or k in model.private_buffers}


def by_distance(model: Model, t: Params, x: Tree) -> Tensor:
    """Minus the squared distance to each known prototype, least for the others; of the head before there is one."""
    f, output = model.features_and_outputs(t, x)
    near = -torch.cdist(f, t[PROTOTYPES]).square()
    is_known = t[IS_KNOWN] > 0
    return torch.where(is_known.any(), torch.where(is_known, near, torch.finfo(near.dtype).min / 2), output)
