"""The arithmetic of local steps: fast paths or not, and products in lower precision with scaled losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["float32", "bfloat16", "float16"]
SCALE = 2.0**10  # of a loss at first: gradients of float16 below 6e-8 would be 0
STEADY = 200  # steps without overflow after which the scale is doubled


@dataclass(frozen=True)
class Arithmetic:
    """Beside what is computed: how."""

    kernels: Literal["auto", "off"] = "auto"  # fast paths where there are some, or the general path always
    precision: Precision = "float32"  # of products; parameters, steps and sums stay in the model's type
    compile: bool = False  # losses and their gradients by torch.compile, in place of the fast paths

    @property
    def is_lower(self) -> bool:
        return self.precision != "float32"

    def cast(self, device: torch.device) -> AbstractContextManager[object]:
        """Products inside are computed in this precision."""
        if not self.is_lower:
            return nullcontext()
        # a cast of parameters must not outlive the step, which writes into them
        return torch.autocast(device.type, dtype=getattr(torch, self.precision), cache_enabled=False)

    def scaling(self, like: Tensor) -> LossScale | None:
        """For a training whose step sizes are `like`, one or one per client; None where nothing underflows."""
        return LossScale(torch.full_like(like, SCALE), torch.zeros_like(like)) if self.precision == "float16" else None


def mean_loss(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Over the samples that count."""
    return losses.mean() if weight is None else (losses * weight).sum() / weight.sum().clamp(min=1)


@dataclass
class LossScale:
    """Losses are scaled so that small gradients of float16 are not 0; a step whose gradients overflow is left out.

    All of it stays on the device: nobody waits to learn whether a step was left out.
    """

    scale: Tensor  # one, or one per client of a stack
    steady: Tensor  # steps since it was changed

    def unscale(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The gradients, 0 where some overflowed, and whether none did; the scale is that of the next step."""
        stacked = self.scale.dim()
        finite = torch.stack([torch.isfinite(g).flatten(stacked).all(-1) for g in gradients]).all(0)
        own = [torch.where(widen(finite, g), g / widen(self.scale, g), torch.zeros_like(g)) for g in gradients]
        self.steady = torch.where(finite, self.steady + 1, torch.zeros_like(self.steady))
        is_due = self.steady >= STEADY
        grown = torch.where(is_due, 2 * self.scale, self.scale)
        self.scale = torch.where(finite, grown, self.scale / 2).detach()
        self.steady = torch.where(is_due, torch.zeros_like(self.steady), self.steady)
        return own, finite


def widen(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(value.shape + (1,) * (like.dim() - value.dim()))
