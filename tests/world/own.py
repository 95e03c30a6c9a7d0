"""What a stranger writes: a task, metrics and a loader of her own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor import FederatedData


@dataclass(frozen=True)
class LogCosh:
    """A regression with a loss that fedtailor has not."""

    sharpness: float = 1.0
    kind = "regression"
    metrics = ("rmse", "loss")

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.cosh(self.sharpness * (output - target)).log().mean(-1)


class Mean:
    """A loss that is the mean of all samples, which it must not be."""

    kind = "regression"
    metrics = ("rmse",)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


def bias(outputs: Tensor, target: Tensor) -> float:
    """How far predictions are off on average."""
    return float((outputs - target).mean().abs())


bias.higher_is_better = False  # type: ignore[attr-defined]


def undirected(outputs: Tensor, target: Tensor) -> float:
    """Does not say which way is better."""
    return 0.0


def load(seed: int, clients: int = 3) -> FederatedData:
    """Numbers of a few clients."""
    rng = np.random.default_rng(seed)
    return ft.federated(
        {f"site-{i}": (rng.normal(size=(12 + i, 4)), rng.normal(size=(12 + i, 1))) for i in range(clients)},
        task="regression",
        name="numbers",
        seed=seed,
    )


class Narrow(nn.Module):
    """Made for samples of another shape."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.out = nn.Linear(7, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class Both(nn.Module):
    """Gives two things where a task takes one."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.out = nn.Linear(shape[0], outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.out(x), x


class Wide(Both):
    """Gives more columns than there are."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.out(x).expand(-1, 3)
