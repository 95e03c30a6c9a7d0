"""Networks of the papers, each with a declared head. Shapes come from the data: no size is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.errors import ConfigError
from fedtailor.training.kernels.structure import dense_stack, split_at_head


@dense_stack(lambda module: ("out",))
class Linear(nn.Module):
    """One affine map; the head is all of it."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.out = nn.Linear(prod(shape), outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


@dense_stack(lambda module: (*(f"hidden.{i}" for i in range(len(module.hidden))), "out"))
class MLP(nn.Module):
    """Hidden layers with ReLU; the head is the last layer."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...] = (128, 128)) -> None:
        super().__init__()
        if not isinstance(hidden, list | tuple):
            raise ConfigError(f"model.hidden = {hidden!r}: must be a list such as [16]")
        _check_sizes("hidden", *hidden)
        widths = (prod(shape), *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.out(x)


class LSTM(nn.Module):
    """LSTM layers over a window, [time] or [time, features]; the head reads the last hidden state.

    A step takes in `per_step` times at once: a week of hours is 168 steps of one hour or 7 of a day. The layers are
    matrix products, because nn.LSTM does not run for a stack of clients (vmap). Its two biases act as their sum only,
    and are one here.
    """

    head = ("out",)

    def __init__(
        self, shape: tuple[int, ...], outputs: int, hidden: int = 12, layers: int = 2, per_step: int = 1
    ) -> None:
        super().__init__()
        _check_sizes("hidden", hidden)
        _check_sizes("layers", layers)
        if per_step < 1 or shape[0] % per_step:
            raise ValueError(f"a window of {shape[0]} is not a whole number of steps of {per_step}")
        self.by_step = (shape[0] // per_step, per_step)
        widths = [prod((per_step, *shape[1:])), *[hidden] * layers]
        self.layers = nn.ModuleList(LSTMLayer(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unflatten(1, self.by_step).flatten(2).unbind(1)
        for layer in self.layers:
            steps = layer(steps)
        return self.out(steps[-1])


class LSTMLayer(nn.Module):
    """The hidden state of every step; one product per step makes the three gates and the news they let in."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Linear(inputs + hidden, 4 * hidden)
        for parameter in self.gates.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)  # the range of nn.LSTM

    def forward(self, steps: Sequence[Tensor]) -> list[Tensor]:
        state = memory = steps[0].new_zeros(steps[0].shape[0], self.hidden)
        states: list[Tensor] = []
        for x in steps:
            gates, news = self.gates(torch.cat([x, state], dim=1)).split([3 * self.hidden, self.hidden], dim=1)
            take, keep, show = torch.sigmoid(gates).split(self.hidden, dim=1)
            memory = keep * memory + take * torch.tanh(news)
            state = show * torch.tanh(memory)
            states.append(state)
        return states


@split_at_head("fc3")
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

    def before_head(self, x: Tensor) -> Tensor:
        x = torch.relu(F.max_pool2d(self.conv1(x), 2))  # the same the other way round, with a fourth of the work
        x = torch.relu(F.max_pool2d(self.conv2(x), 2))
        return torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.before_head(x))


@split_at_head("fc")
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

    def before_head(self, x: Tensor) -> Tensor:
        x = torch.relu(F.max_pool2d(self.conv1(x), 2))
        return torch.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.before_head(x))


@split_at_head("out")
class CNN(nn.Module):
    """Two 5x5 convolutions and a dense layer, 582 026 parameters for ten classes of 28x28; its head is the last."""

    head = ("out",)

    def __init__(
        self, shape: tuple[int, ...], outputs: int, channels: tuple[int, int] = (32, 64), hidden: int = 512
    ) -> None:
        super().__init__()
        colours, height, width = shape
        _at_least(16, height, width)
        _check_sizes("channels", *channels)
        _check_sizes("hidden", hidden)
        first, second = channels
        self.conv1 = nn.Conv2d(colours, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.hidden = nn.Linear(second * _pooled_twice(height) * _pooled_twice(width), hidden)
        self.out = nn.Linear(hidden, outputs)

    def before_head(self, x: Tensor) -> Tensor:
        x = torch.relu(F.max_pool2d(self.conv1(x), 2))
        x = torch.relu(F.max_pool2d(self.conv2(x), 2))
        return torch.relu(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.before_head(x))


def _check_sizes(option: str, *sizes: int) -> None:
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"model.{option}: {size!r} is not a whole number above 0")


def _at_least(size: int, height: int, width: int) -> None:
    if min(height, width) < size:
        raise ValueError(f"images must be at least {size}x{size}")


def _pooled_twice(size: int) -> int:
    """Width after two 5x5 convolutions, each halved."""
    return ((size - 4) // 2 - 4) // 2
