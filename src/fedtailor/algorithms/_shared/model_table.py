"""The last model of each client, kept by the server by the client's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedtailor.core.federation import Federation, PerClient
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, tree_map


def gather_models(fed: Federation, replies: PerClient) -> dict[str, Params]:
    """Models that the clients of a round have sent, by name."""
    models = fed.gather(replies, "model of each client")
    return {fed.names[c]: tree_map(lambda v, i=i: v[i], models) for i, c in enumerate(replies.clients)}


def stack_models(models: Iterable[Params]) -> Params:
    each = list(models)
    return {k: torch.stack([one[k] for one in each]) for k in each[0]}


def mean_or(start: Params, models: dict[str, Params]) -> Params:
    """The mean of all models, or `start` if there are none yet."""
    return {k: v.mean(0) for k, v in stack_models(models.values()).items()} if models else start


def less(sent: Params, names: Sequence[str], trained: dict[str, Params], model: Model) -> Params:
    """What was sent less what came back, row by row: minus the change. 0 where nothing did, and for statistics."""

    def row(k: str, i: int, name: str) -> Tensor:
        is_changed = name in trained and k in model.trainable
        return sent[k][i] - trained[name][k] if is_changed else torch.zeros_like(sent[k][i])

    return {k: torch.stack([row(k, i, name) for i, name in enumerate(names)]) for k in sent}
