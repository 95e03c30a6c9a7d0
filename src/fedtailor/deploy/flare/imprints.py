"""Models that are made to read training rows off a reply, found by their shape.

An "imprint" layer (Fowl et al., "Robbing the Fed", ICLR 2022) has many units with the same weights and other biases:
each is a threshold on one number of a sample, and neighbours differ by the samples between two thresholds. The check
finds exactly that. A server that knows it can hide such a layer better: what bounds the leak are secure sums, clipping
and noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedtailor.core.trees import Tree

UNITS = 8  # fewer thresholds tell little
SHARE = 0.25  # of a layer's units
SAME = 1e-4  # directions that differ by less are one
LEAST_INPUTS = 3  # with fewer, directions are easily alike


def imprinted(message: Tree) -> str | None:
    """The name of a layer whose units are thresholds on one direction, in a message with parameters by name."""
    for name, weight, bias in _layers(message):
        if (units := _thresholds(weight, bias)) >= max(UNITS, SHARE * len(weight)):
            return f"{units} of {len(weight)} units of {name} are thresholds on one direction"
    return None


def _layers(tree: Tree) -> Iterator[tuple[str, Tensor, Tensor]]:
    if isinstance(tree, dict):
        for key, weight in tree.items():
            bias = tree.get(f"{key.removesuffix('weight')}bias") if key.endswith("weight") else None
            if isinstance(weight, Tensor) and isinstance(bias, Tensor) and bias.shape == weight.shape[:1]:
                rows = weight.detach().flatten(1).double() if weight.dim() > 1 else weight[:0]
                if rows.dim() == 2 and rows.shape[1] >= LEAST_INPUTS:
                    yield key.removesuffix(".weight"), rows, bias.detach().double()
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ():
        yield from _layers(part)


def _thresholds(weight: Tensor, bias: Tensor) -> int:
    """Units in the largest group with one direction and different thresholds."""
    norms = weight.norm(dim=1)
    alive = norms > 0
    directions, thresholds = weight[alive] / norms[alive, None], bias[alive] / norms[alive]
    if len(directions) < UNITS:
        return 0
    # a direction by two numbers: rows are sorted by them, not compared with each other
    seed = torch.Generator().manual_seed(0)
    marks = torch.randn(weight.shape[1], 2, generator=seed, dtype=torch.float64, device="cpu")
    places = (directions @ marks / marks.norm(dim=0) / SAME).round().to(torch.int64)
    _, group = places.unique(dim=0, return_inverse=True)
    return max((len(thresholds[group == g].unique()) for g in group.bincount().topk(1).indices), default=0)
