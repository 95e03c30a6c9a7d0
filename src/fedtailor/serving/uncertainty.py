"""How sure a personal model is: calibrated logits, and intervals around numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.trees import Params
from fedtailor.errors import DataError, RunError
from fedtailor.serving.trees import TreeParts

Floats = NDArray[np.float64]


ErrorScale = Literal["plain", "log", "root"]  # on which an interval reaches equally far to both sides


def around(middle: Floats, half: float, scale: ErrorScale) -> tuple[Floats, Floats]:
    """The ends of intervals around numbers, logarithms or, of counts, square roots, whose spread is always the same."""
    if scale == "log":
        return middle * math.exp(-half), middle * math.exp(half)
    if scale == "root":
        root = np.sqrt(middle)
        return np.maximum(root - half, 0.0) ** 2, (root + half) ** 2
    return middle - half, middle + half


def errors(middle: Floats, y: Floats, scale: ErrorScale) -> Floats:
    """How far numbers are from the middle of their intervals, on their scale."""
    if scale == "plain":
        return np.abs(y - middle)
    return np.abs(np.log(y) - np.log(middle)) if scale == "log" else np.abs(np.sqrt(y) - np.sqrt(middle))


@dataclass(frozen=True)
class Extras:
    """What a fit to tables gives a site beside its linear model."""

    trees: TreeParts | None = None
    slope: float = 1.0
    offset: float = 0.0  # of the second of two classes
    half_widths: Mapping[float, float] = field(default_factory=dict)  # by level, on the scale of errors

    def applied(self, x: Any, outputs: Tensor, is_class: bool) -> Tensor:
        """Outputs of all parts together, calibrated."""
        mixed = outputs if self.trees is None else self.trees.mixed(x, outputs, is_class)
        if (self.slope, self.offset) == (1.0, 0.0):
            return mixed
        mixed = mixed * self.slope
        return mixed + mixed.new_tensor([0.0, self.offset]) if self.offset else mixed

    def half_width(self, level: float, source: str) -> float:
        """Half the width of the interval that holds this share of the rows; linear between levels that are known."""
        if not self.half_widths:
            raise RunError(
                f"{source}: has no prediction intervals; a fit of numbers in tables with --algorithm auto has"
            )
        known = sorted(self.half_widths)
        if not known[0] <= level <= known[-1]:
            raise DataError(f"--interval {level:g}: must be from {known[0]:g} to {known[-1]:g}")
        above = next(each for each in known if each >= level)
        below = max(each for each in known if each <= level)
        low, high = self.half_widths[below], self.half_widths[above]
        return high if above == below else low + (high - low) * (level - below) / (above - below)


def extras_of(row: Mapping[str, Any], record: Mapping[str, Any], trees: TreeParts | None) -> Extras:
    """As the record of a fit has them; a site that came later has the intervals of all."""
    slope, offset = row.get("calibration", (1.0, 0.0))
    widths = row.get("half_widths", record.get("half_widths", ()))
    if not all(isinstance(v, float | int) and math.isfinite(v) for v in (slope, offset, *widths)):
        raise RunError("fit.json: calibration and half_widths must be numbers", code="run.damaged")
    return Extras(trees, float(slope), float(offset), dict(zip(record.get("levels", ()), widths, strict=False)))


def folded(params: Params, extras: Extras) -> tuple[Params, Extras]:
    """Without trees, calibration is a part of the linear model, and every export has it."""
    if extras.trees is not None or (extras.slope, extras.offset) == (1.0, 0.0):
        return params, extras
    scaled = {name: value * extras.slope for name, value in params.items()}
    for name, value in scaled.items():
        if value.dim() == 1 and len(value) == 2:
            scaled[name] = value + torch.tensor([0.0, extras.offset], dtype=value.dtype)
    return scaled, Extras(None, half_widths=extras.half_widths)
