"""Degrees of collaboration of a network's parameters: one for each group of them, kept as log lam."""

from __future__ import annotations

from math import log
from typing import Literal

import torch

from fedtailor.core.trees import Params
from fedtailor.training.optimizers import adam_direction

Grain = Literal["layer", "tensor", "parameter"]


def group(name: str, grain: Grain) -> str:
    """What a parameter shares its degree with."""
    return name.rpartition(".")[0] if grain == "layer" else name


def first(part: Params, grain: Grain, share: float, rho: float) -> Params:
    """log lam of every group such that lam / (lam + rho) is the share of the common model."""
    value = next(iter(part.values())).new_full((), log(rho * share / (1 - share)))
    if grain == "parameter":
        return {k: value.expand(v.shape).clone() for k, v in part.items()}
    return {group(k, grain): value for k in part}


def each(degrees: Params, part: Params, grain: Grain) -> Params:
    """log lam of every parameter."""
    return {k: degrees[group(k, grain)].expand(v.shape) for k, v in part.items()}


def shares(degrees: Params, part: Params, grain: Grain, rho: float) -> Params:
    """s = lam / (lam + rho) of every parameter."""
    return {k: torch.sigmoid(x - log(rho)) for k, x in each(degrees, part, grain).items()}


def shrunk(deviation: Params, degrees: Params, grain: Grain, rho: float) -> Params:
    """z = (1 - s) (v - w - a), what is left of a deviation from the common model."""
    s = shares(degrees, deviation, grain, rho)
    return {k: (1 - s[k]) * x for k, x in deviation.items()}


def adam(degrees: Params, gradient: Params, moments: tuple[Params, Params], lr: float) -> tuple[Params, Params, Params]:
    """A step with short memory, as there are few of them; and the moments after it."""
    stepped, first, second = {}, {}, {}
    for k, x in degrees.items():
        direction, first[k], second[k] = adam_direction(
            gradient[k], moments[0][k], moments[1][k], None, betas=(0.5, 0.9), beside=1e-12
        )
        stepped[k] = x - lr * direction
    return stepped, first, second
