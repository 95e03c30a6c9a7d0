"""Residual networks (He et al., CVPR 2016) with torchvision's names of parameters; the head is the last layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.errors import ConfigError, nearest
from fedtailor.training.kernels.structure import split_at_head

# per stage; each stage has twice the channels of the last
BLOCKS = {8: (1, 1, 1), 14: (2, 2, 2), 18: (2, 2, 2, 2), 20: (3, 3, 3), 34: (3, 4, 6, 3)}
STEMS = ("cifar", "imagenet")


def resnet8(
    shape: tuple[int, ...], outputs: int, width: int = 16, stem: str = "cifar", norm: str = "batch"
) -> nn.Module:
    """ResNet-8 for small images, 78 042 parameters with ten classes; the head is the last layer."""
    return ResNet(shape, outputs, 8, width, stem, norm)


def resnet14(
    shape: tuple[int, ...], outputs: int, width: int = 16, stem: str = "cifar", norm: str = "batch"
) -> nn.Module:
    """ResNet-14 for small images, 175 258 parameters with ten classes; the head is the last layer."""
    return ResNet(shape, outputs, 14, width, stem, norm)


def resnet18(
    shape: tuple[int, ...], outputs: int, width: int = 64, stem: str = "cifar", norm: str = "batch"
) -> nn.Module:
    """ResNet-18, 11 173 962 parameters with ten classes; stem "imagenet" makes it torchvision's."""
    return ResNet(shape, outputs, 18, width, stem, norm)


def resnet20(
    shape: tuple[int, ...], outputs: int, width: int = 16, stem: str = "cifar", norm: str = "batch"
) -> nn.Module:
    """ResNet-20 for small images, 272 474 parameters with ten classes; the head is the last layer."""
    return ResNet(shape, outputs, 20, width, stem, norm)


def resnet34(
    shape: tuple[int, ...], outputs: int, width: int = 64, stem: str = "cifar", norm: str = "batch"
) -> nn.Module:
    """ResNet-34, 21 282 122 parameters with ten classes; stem "imagenet" makes it torchvision's."""
    return ResNet(shape, outputs, 34, width, stem, norm)


@split_at_head("fc")
class ResNet(nn.Module):
    """Basic blocks in stages; from stage to stage the channels double and the sides of the image halve.

    stem: "cifar" keeps the size of the image; "imagenet" shrinks it to a quarter before the first stage.
    norm: "batch", whose statistics follow `model.buffers`, or "group", which has none.
    """

    head = ("fc",)

    def __init__(
        self,
        shape: tuple[int, ...],
        outputs: int,
        depth: int = 18,
        width: int = 64,
        stem: str = "cifar",
        norm: str = "batch",
    ) -> None:
        super().__init__()
        channels, _, _ = shape
        if depth not in BLOCKS:
            raise ConfigError(f"model.depth = {depth}: must be one of {', '.join(map(str, BLOCKS))}")
        if norm == "group" and width % 8:
            raise ConfigError(f'model.width = {width}: norm "group" needs a multiple of 8')
        _known("stem", stem, STEMS)
        make_norm = NORMS[_known("norm", norm, NORMS)]
        self.shrinks = stem == "imagenet"
        self.conv1 = nn.Conv2d(channels, width, 7, 2, 3, bias=False) if self.shrinks else _conv(channels, width)
        self.bn1 = make_norm(width)
        self.stages = [f"layer{i + 1}" for i in range(len(BLOCKS[depth]))]
        widths = [width * 2**i for i in range(len(self.stages))]
        before = width
        for name, count, here in zip(self.stages, BLOCKS[depth], widths, strict=True):
            stride = 1 if name == "layer1" else 2
            first = Block(before, here, stride, make_norm)
            self.add_module(name, nn.Sequential(first, *(Block(here, here, 1, make_norm) for _ in range(count - 1))))
            before = here
        self.fc = nn.Linear(before, outputs)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def before_head(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        if self.shrinks:
            x = F.max_pool2d(x, 3, 2, 1)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x.mean((-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.before_head(x))


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, stride)
        self.bn1 = make_norm(outputs)
        self.conv2 = _conv(outputs, outputs)
        self.bn2 = make_norm(outputs)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(project, make_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def _group_norm(channels: int) -> nn.GroupNorm:
    """Groups of 16 channels (Wu, He, ECCV 2018), or 8 where 16 do not divide them."""
    return nn.GroupNorm(channels // gcd(16, channels), channels)


NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": _group_norm}


def _known(option: str, value: str, known: Sequence[str] | dict[str, Callable[[int], nn.Module]]) -> str:
    if value not in known:
        raise ConfigError(f'model.{option} = "{value}": no such {option}; {nearest(str(value), known)}')
    return value
