"""Local training of stacks of dense layers, without autograd: the update is part of the backward pass.

For clients side by side one batched product per layer and direction does the work of a step, and the product that would
be the gradient of a weight is added to the weight at once. For plain SGD, with proximal terms, masks and frozen
layers; equal to the general path of `training` to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fedtailor.core.data import take
from fedtailor.core.task import classification_loss, regression_loss
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.training.batches import Batch
from fedtailor.training.kernels import layout, output_buffers, winograd
from fedtailor.training.kernels.structure import AffineLayer, dense_layers, head_layer
from fedtailor.training.specification import Training

Gradient = Callable[[Tensor, Tensor], Tensor]  # of a sample's loss by its output
CACHE = 13 * 2**18  # bytes of parameters that a core works on fast
WORTHWHILE = 4  # steps; a pass of fewer is not faster than each for itself


def _of_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    gradient = output.softmax(-1)
    return gradient.scatter_add_(-1, target[..., None], gradient.new_full((*target.shape, 1), -1.0))


def _of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mul_(2 / output.shape[-1])


GRADIENTS: dict[Callable[[Tensor, Tensor], Tensor], Gradient] = {
    classification_loss: _of_cross_entropy,
    regression_loss: _of_squares,
}


def train_dense(training: Training, t: Tree) -> tuple[Params, Params]:
    """The layers after all steps, of one client or of a stack."""
    layers, gradient = dense_layers(training.model), GRADIENTS[training.loss]
    x, y, batches = training.data.x, training.data.y, training.draw(training.is_stacked)
    if training.is_stacked:
        return train_stack(layers, gradient, t, x, y, batches), t["buffers"]
    alone = [replace(batch, rows=batch.rows[None]) for batch in batches]
    return train_one(layers, gradient, t, x, y, alone), t["buffers"]


def train_one(
    layers: Sequence[AffineLayer], gradient: Gradient, t: Tree, x: Tensor, y: Tensor, batches: Sequence[Batch]
) -> Params:
    stack = train_stack(layers, gradient, tree_map(lambda v: v[None], t), x, y, batches)
    return {k: v[0] for k, v in stack.items()}


def train_stack(
    layers: Sequence[AffineLayer],
    gradient: Gradient,
    tensors: Tree,
    x: Tensor,
    y: Tensor,
    batches: Sequence[Batch],
) -> Params:
    """All steps for clients side by side; `tensors` as in `Training`, each with a leading client dimension.

    Some clients take all of their steps before the next ones begin, so that their parameters stay in the cache.
    """
    start = tensors["params"]
    buffers = output_buffers.current()
    trained: Params = {k: buffers.take(v) for k, v in start.items()}
    count, some = len(tensors["lr"]), at_a_time(start | tensors["frozen"])
    first = layers[0].weight
    rows = rows_ahead(first, tensors)
    # weights that all have in common, and that are written only when all steps are done, do not need the cache
    is_one_pass = len(_passes(batches, rows)) == 1 < len(batches) and start[first].stride(0) == 0
    for here in _slices(0, count, count if is_one_pass else some):
        part = tree_map(lambda v, here=here: v[here], tensors | {"trained": trained})
        ahead = _train_part(layers, gradient, part, x, y, _passes(list(_of(batches, here)), rows))
        if ahead is not None:
            for done in _slices(here.start, here.stop, some):
                ahead.finish(slice(done.start - here.start, done.stop - here.start))
                buffers.record_norms(trained[first], done)
        for k, v in trained.items():
            if k != first or ahead is None:
                buffers.record_norms(v, here)
    return trained


def at_a_time(stack: Params) -> int:
    """So many clients that the cache holds the parameters of all of them."""
    return max(1, CACHE // sum(v[0].nbytes for v in stack.values()))


def rows_ahead(weight: str, tensors: Tree) -> int:
    """The samples of one pass over the first layer: so few that their products are an eighth of the work.

    None, if a mask or the pull of a center needs the weights themselves in every step.
    """
    if weight not in tensors["params"] or tensors["mask"] is not None or weight in (tensors["center"] or {}):
        return 0
    outputs, inputs = tensors["params"][weight].shape[1:]
    return int(outputs * inputs / (2 * (outputs + inputs)))


class DeferredWeightUpdate:
    """Several steps in one pass over the first layer, whose inputs are known beforehand.

    Step s moves the weights W by -E(s)' X(s). So the outputs of step t are, with W from before the pass, X(t) W' - sum
    over s < t of (X(t) X(s)') E(s). W is read once and written once, by products larger, and faster, than a step's.
    """

    def __init__(self, weight: Tensor, into: Tensor, x: Tensor) -> None:
        self._weight, self._into, self._x = weight, into, x
        is_common = weight.stride(0) == 0
        self._outputs = torch.matmul(x, weight[0].T) if is_common else torch.bmm(x, weight.mT)
        self._moves = torch.empty_like(self._outputs)

    def outputs(self, rows: slice) -> Tensor:
        """Of a step, without the bias; to be asked for once."""
        out, before = self._outputs[:, rows], slice(rows.start)
        if rows.start:
            products = torch.bmm(self._x[:, rows], self._x[:, before].mT)
            out.baddbmm_(products, self._moves[:, before], alpha=-1)
        return out

    def move(self, rows: slice, d: Tensor) -> None:
        """What a step does: `d` is the gradient of its outputs, scaled by the step size."""
        self._moves[:, rows] = d

    def finish(self, clients: slice = slice(None)) -> None:
        """Make the weights after the last step."""
        moves, x = self._moves[clients], self._x[clients]
        torch.baddbmm(self._weight[clients], moves.mT, x, alpha=-1, out=self._into[clients])


def _slices(first: int, last: int, length: int) -> Iterator[slice]:
    return (slice(i, min(i + length, last)) for i in range(first, last, length))


def _of(batches: Sequence[Batch], clients: slice) -> Iterator[Batch]:
    """The batches of some clients of a stack, without the padding that only others need."""
    for batch in batches:
        rows, weight, active = batch.rows[clients], batch.weight, batch.active
        if active is not None and not bool((active := active[clients]).any()):
            continue
        if weight is not None:
            weight = weight[clients]
            longest = int(weight.sum(1).max())
            rows, weight = rows[:, :longest], weight[:, :longest]
        yield Batch(rows, weight, active)


def _passes(batches: Sequence[Batch], rows: int) -> list[list[Batch]]:
    """Batches that are taken in one pass, of at most so many rows; single ones where too few would come together."""
    passes: list[list[Batch]] = []
    for batch in batches:
        if passes and sum(b.rows.shape[1] for b in (*passes[-1], batch)) <= rows:
            passes[-1].append(batch)
        else:
            passes.append([batch])
    return [
        part
        for batches_of_pass in passes
        for part in ([batches_of_pass] if len(batches_of_pass) >= WORTHWHILE else [[b] for b in batches_of_pass])
    ]


def _train_part(
    layers: Sequence[AffineLayer],
    gradient: Gradient,
    tensors: Tree,
    x: Tensor,
    y: Tensor,
    passes: Sequence[Sequence[Batch]],
) -> DeferredWeightUpdate | None:
    """All steps for as many clients as the cache holds; their parameters are made in place.

    The last pass over the first layer may be left to be finished.
    """
    start, trained, first = tensors["params"], tensors["trained"], layers[0].weight
    for k, v in trained.items():
        if k != first or not passes or len(passes[0]) == 1:
            v.copy_(start[k])
    values = tensors["frozen"] | trained
    weights = [values[layer.weight] for layer in layers]
    biases = [None if layer.bias is None else values[layer.bias][:, None] for layer in layers]
    lowest = next(i for i, layer in enumerate(layers) if layer.weight in trained or layer.bias in trained)
    lr, mu, center, mask = (tensors[k] for k in ("lr", "mu", "center", "mask"))
    ahead: DeferredWeightUpdate | None = None
    for number, batches in enumerate(passes):
        if ahead is not None:
            ahead.finish()
        rows = torch.cat([batch.rows for batch in batches], 1)
        xs = x.index_select(0, rows.reshape(-1)).reshape(*rows.shape, -1)
        ys = y.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *y.shape[1:])
        ahead = (
            DeferredWeightUpdate((trained if number else start)[first], trained[first], xs)
            if len(batches) > 1
            else None
        )
        last = 0
        for batch in batches:
            size = batch.rows.shape[1]
            here = slice(last, last := last + size)
            scale = (
                lr[:, None, None] / size
                if batch.weight is None
                else (lr[:, None] * batch.weight / batch.weight.sum(1, keepdim=True).clamp(min=1))[..., None]
            )
            inputs = [xs[:, here]]
            for i, weight in enumerate(weights):
                bias, product = biases[i], weight.mT
                if i == 0 and ahead is not None:
                    out = ahead.outputs(here) if bias is None else ahead.outputs(here).add_(bias)
                else:
                    out = torch.bmm(inputs[i], product) if bias is None else torch.baddbmm(bias, inputs[i], product)
                inputs.append(out.relu_() if i + 1 < len(weights) else out)
            d = gradient(inputs[-1], ys[:, here]).mul_(scale)
            pull = None if mu is None else lr * mu if batch.active is None else lr * mu * batch.active
            for i in range(len(layers) - 1, lowest - 1, -1):
                below = torch.bmm(d, weights[i]) if i > lowest else d
                if below is not d:
                    below = torch.ops.aten.threshold_backward(below, inputs[i], 0)
                for name in (layers[i].weight, layers[i].bias):
                    if name is None or name not in trained:
                        continue
                    if name == first and ahead is not None:
                        ahead.move(here, d)
                        continue
                    value, own = trained[name], None if mask is None else mask[name]
                    if pull is not None and name in center:
                        amount = pull.reshape(-1, *[1] * (value.dim() - 1))
                        value.lerp_(center[name], amount if own is None else amount * own)
                    _descend(value, d, inputs[i], own)
                d = below
    return ahead


def _descend(value: Tensor, d: Tensor, inputs: Tensor, mask: Tensor | None) -> None:
    """Subtract the gradient of a weight or a bias, which `d` (scaled by the step size) and the layer's inputs make."""
    if value.dim() == 2:
        step = d.sum(1)
        value.sub_(step if mask is None else step * mask)
    elif mask is None:
        value.baddbmm_(d.mT, inputs, alpha=-1)
    else:
        value.sub_(torch.bmm(d.mT, inputs).mul_(mask))


AT_ONCE = 256  # samples of a pass


def train_head(training: Training, t: Tree) -> tuple[Params, Params]:
    """The head after all steps of one client: what comes before it is computed once for each sample."""
    layer, model = head_layer(training.model), training.model
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
    gradient = GRADIENTS[training.loss]
    return train_one([layer], gradient, t | {"frozen": {}}, before, take(y, rows), mine), t["buffers"]
