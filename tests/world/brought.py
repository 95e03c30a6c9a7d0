"""Models as people have them: factories with any options, inputs and outputs by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def make(shape: tuple[int, ...], outputs: int, **options: Any) -> nn.Module:
    """A factory that hands its options on."""
    depth, width = options.pop("depth", 1), options.pop("width", 4)
    assert not options
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(shape[0] if i == 0 else width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class AutoEncoder(nn.Module):
    """Several outputs by name."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(shape[0], 2), nn.Linear(2, shape[0])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = torch.tanh(self.encoder(x))
        return {"reconstruction": self.decoder(code), "code": code}


class Rebuilding:
    """The task of an autoencoder; targets are the samples."""

    kind = "own"
    metrics = ("loss",)

    def loss(self, output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output["reconstruction"], target, reduction="none").mean(1)
