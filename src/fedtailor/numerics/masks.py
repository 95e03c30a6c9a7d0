"""Masks over the entries of a model: how they grow, how much they overlap, and how they and what they keep travel.

A mask is True where an entry is the client's own. What packs and unpacks takes the entries of many clients, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.core.trees import Params, Ragged, flat, unflat, wide
from fedtailor.errors import ConfigError, RoundAbandoned, nearest


def check(rate: float, limit: float, interval: int) -> None:
    """Refuse what masks cannot grow by."""
    if not (0 <= rate <= 1 and 0 <= limit <= 1 and interval > 0):
        raise ConfigError("algorithm: FedSelect needs rate and alpha between 0 and 1, and interval above 0")


def under(params: Params, parts: Collection[str]) -> Params:
    """A mask of whole parts: modules, or single parameters."""
    inside = {part: {k for k in params if k == part or k.startswith(part + ".")} for part in parts}
    if strange := [part for part, names in inside.items() if not names]:
        raise ConfigError(f'algorithm.layers: the model has no part "{strange[0]}"; {nearest(strange[0], params)}')
    chosen = set().union(*inside.values())
    return {k: torch.full_like(v, k in chosen, dtype=torch.bool) for k, v in params.items()}


def largest(score: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """Where the `count` largest eligible scores of a vector are; of equal ones the first."""
    chosen: Tensor = _Largest.apply(score, eligible, count)
    return chosen


class _Largest(torch.autograd.Function):
    """Client by client also in a stack, so that masks that have reached their limit are not ranked any more."""

    @staticmethod
    def forward(score: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
        if count <= 0:
            return torch.zeros_like(eligible)
        numbers = _as_whole_numbers(torch.where(eligible, score, -torch.inf)).cpu().numpy()
        number = min(int(count), len(numbers))
        least = np.partition(numbers, len(numbers) - number)[len(numbers) - number]  # less memory than ranks of all
        chosen = numbers > least
        equal = np.flatnonzero(numbers == least)
        chosen[equal[: number - np.count_nonzero(chosen)]] = True
        return eligible & torch.from_numpy(chosen).to(eligible.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
        rows = [
            [v.select(d, i) if d is not None else v for v, d in zip(args, in_dims, strict=True)]
            for i in range(info.batch_size)
        ]
        return torch.stack([_Largest.apply(*row) for row in rows]), 0


def _as_whole_numbers(score: Tensor) -> Tensor:
    """Numbers in the same order, of which all can be compared: NaN comes behind infinity."""
    bits = (score + 0.0).view(torch.int64 if score.dtype == torch.float64 else torch.int32)  # without a negative zero
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def grown(
    mask: Params, score: Params, eligible: set[str], rate: float, limit: float, per_tensor: bool, overshoot: bool
) -> Params:
    """The mask and the entries with the largest scores: `rate` of those still shared, up to `limit` of all.

    per_tensor: rate, limit and ranking within each tensor, not over the whole model.
    overshoot: a mask below its limit takes the whole of its addition, and may end above it.
    """

    def wider(mask: Tensor, score: Tensor, eligible: Tensor) -> Tensor:
        shared, own = (eligible & ~mask).sum(), mask.sum()
        count = torch.round(rate * wide(shared))
        if overshoot:
            count = torch.where(own < limit * len(mask), count, 0)
        else:
            count = torch.minimum(count, round(limit * len(mask)) - own)
        return mask | largest(score, eligible & ~mask, count)

    may = {k: torch.full_like(m, k in eligible) for k, m in mask.items()}
    if per_tensor:
        return {k: wider(m.flatten(), score[k].flatten(), may[k].flatten()).reshape(m.shape) for k, m in mask.items()}
    return unflat(wider(flat(mask), flat(score), flat(may)), mask)


def scores(
    now: Params, before: Params, mask: Params, choice: str, normalise: bool, uniform: Callable[[int], Tensor]
) -> Params:
    """What entries are ranked by: "most" or "least" change, or "random"; changes in units of their tensor's mean."""
    if choice == "random":
        return unflat(uniform(len(flat(now))), now)
    change = {k: (v - before[k]).abs() for k, v in now.items()}
    change = normalised(change, mask) if normalise else change
    return {k: v if choice == "most" else -v for k, v in change.items()}


def normalised(change: Params, mask: Params) -> Params:
    """Changes in units of the mean change of the entries of their tensor that are still shared."""
    shared = {k: ~m for k, m in mask.items()}
    total = {k: (v * shared[k]).sum() for k, v in change.items()}
    return {k: v * shared[k].sum() / total[k].clamp(min=torch.finfo(v.dtype).tiny) for k, v in change.items()}


def known(given: Params, names: list[str], entries: Tensor) -> Tensor:
    """The bits of the masks that clients told last; of those who told none, nothing is own."""
    nothing = to_bits(torch.zeros_like(entries))
    return torch.stack([given.get(name, nothing) for name in names])


def news_of(mask: Params, old: Params) -> Ragged:
    """What is said of a mask to who knows the old one: its bits, or nothing if it is still the same."""
    bits, is_new = to_bits(flat(mask)), (flat(mask) != flat(old)).any()
    return Ragged((bits * is_new, len(bits) * is_new))


def heard(news: Ragged, known: Tensor) -> Tensor:
    """The bits of masks of many clients after `news_of` each."""
    return torch.where(news[1][:, None] > 0, news[0], known)


def mean_over_sharers(packed: Ragged, shared: Tensor, weight: Tensor, otherwise: Tensor) -> Tensor:
    """Of every entry the weighted mean over the clients that share it; `otherwise` where nobody does."""
    total, weights = torch.zeros_like(otherwise), torch.zeros_like(otherwise)
    for values, length, keep, w in zip(*packed, shared, weight, strict=True):  # one by one: a stack may be large
        places = _places_of(keep)
        if len(places) != length:
            raise RoundAbandoned("a client sent more or fewer entries than its mask shares")
        total.index_add_(0, places, w * values[: len(places)])
        weights += w * keep
    return torch.where(weights > 0, total / weights.clamp(min=torch.finfo(total.dtype).tiny), otherwise)


def overlap(masks: Tensor) -> Tensor:
    """Intersection over union of every two of a stack of masks [clients, entries]; 1 of two empty ones."""
    m = wide(masks)
    both = m @ m.T
    either = m.sum(1)[:, None] + m.sum(1) - both
    return torch.where(either > 0, both / either.clamp(min=1), 1.0)


def pack(values: Tensor, keep: Tensor) -> Ragged:
    """The entries to keep, moved to the front: only they travel."""
    places = values.shape[-1]
    to = keep.cumsum(-1).sub_(1).masked_fill_(~keep, places)  # what is not kept falls into a place behind the last
    moved = values.new_zeros(*values.shape[:-1], places + 1).scatter(-1, to, values)
    return Ragged((moved[..., :-1], keep.sum(-1)))


def pack_each(values: Tensor, keep: Tensor) -> Ragged:
    """What `pack` makes of the same entries for every row of a stack of masks; faster, where nothing is batched."""
    packed, lengths = values.new_zeros(keep.shape), []
    for row, mine in zip(packed, keep, strict=True):
        places = _places_of(mine)
        row[: len(places)] = values.index_select(0, places)
        lengths.append(len(places))
    return Ragged((packed, packed.new_tensor(lengths, dtype=torch.int64)))


def unpack(packed: Ragged, keep: Tensor) -> Tensor:
    """The entries of `pack` back in their places; 0 elsewhere."""
    return packed[0].gather(-1, keep.cumsum(-1).sub_(1).clamp_(min=0)) * keep


def to_bits(mask: Tensor) -> Tensor:
    """A mask as bytes, eight entries each."""
    eights = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(-1).to(torch.uint8)


def from_bits(bits: Tensor, entries: int) -> Tensor:
    """The masks of `to_bits`, where nothing is batched."""
    unpacked = np.unpackbits(bits.cpu().numpy(), axis=-1, count=entries, bitorder="little")
    return torch.from_numpy(unpacked.view(bool)).to(bits.device)


def _places_of(keep: Tensor) -> Tensor:
    """Where a mask is True; numpy finds it many times faster than torch."""
    return torch.from_numpy(np.flatnonzero(keep.cpu().numpy())).to(keep.device)
