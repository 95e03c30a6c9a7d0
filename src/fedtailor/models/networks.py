"""Networks of the papers, each with a declared head. Shapes come from the data: no size is guessed."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """One affine map; the head is all of it."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.out = nn.Linear(prod(shape), outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


class MLP(nn.Module):
    """Hidden layers with ReLU; the head is the last layer."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...] = (128, 128)) -> None:
        super().__init__()
        widths = (prod(shape), *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)


class LeNet5(nn.Module):
    """LeNet-5 for 32x32 colour images, 62 006 parameters with ten classes; the head is the last layer."""

    head = ("fc3",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = shape
        _at_least(16, height, width)
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * _pooled_twice(height) * _pooled_twice(width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


class FMNISTCNN(nn.Module):
    """Two convolutions for 28x28 grey images, 10 290 parameters with ten classes; the head is the last layer.

    The first convolution is padded by 2, so that 500 features reach the head as in the paper's sizes.
    """

    head = ("fc",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        channels, height, width = shape
        _at_least(12, height, width)
        self.conv1 = nn.Conv2d(channels, 10, 5, padding=2)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc = nn.Linear(20 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def _at_least(size: int, height: int, width: int) -> None:
    if min(height, width) < size:
        raise ValueError(f"images must be at least {size}x{size}")


def _pooled_twice(size: int) -> int:
    """Width after two 5x5 convolutions, each halved."""
    return ((size - 4) // 2 - 4) // 2
