"""Training of the last layer alone: what comes before it is the same in every step, and computed once per sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from fedtailor.core.data import take
from fedtailor.core.trees import Params, Tree
from fedtailor.training.batches import Batch
from fedtailor.training.kernels import dense, layout, structure, winograd
from fedtailor.training.specification import Training

AT_ONCE = 256  # samples of a pass


def train_head(training: Training, t: Tree) -> tuple[Params, Params]:
    """The head after all steps of one client."""
    layer, model = structure.head_layer(training.model), training.model
    assert layer is not None
    batches = training.draw(False)
    x, y = training.data.x, training.data.y
    rows = torch.cat([x.new_zeros(0, dtype=torch.int64), *(b.rows for b in batches)]).unique()
    t = layout.channels_last_tree(t) if model.likes_channels_last else t
    by_hand = winograd.inside(model.module) if model.likes_channels_last else nullcontext()
    with torch.no_grad(), by_hand, model.holding(t["frozen"] | t["params"]) as module:
        compute: Callable[[Tensor], Tensor] = module.before_head  # type: ignore[assignment]
        parts = (compute(layout.channels_last(take(x, some))) for some in rows.split(AT_ONCE))
        before = torch.cat([x.new_zeros(0, t["params"][layer.weight].shape[1]), *parts])
    mine = [Batch(torch.searchsorted(rows, batch.rows)[None]) for batch in batches]
    gradient = dense.GRADIENTS[training.loss]
    return dense.train_one([layer], gradient, t | {"frozen": {}}, before, take(y, rows), mine), t["buffers"]
