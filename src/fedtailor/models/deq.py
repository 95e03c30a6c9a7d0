"""Deep equilibrium models (Bai et al., NeurIPS 2019) as in FeDEQ (Le et al., 2024): a shared body, a personal head.

All of them have the options of `Solve`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.core.model import WARM_START
from fedtailor.errors import ConfigError, nearest
from fedtailor.models.transformers import Embedding, Layer, Shape
from fedtailor.numerics.equilibrium import Equilibrium, fixed_point, rows_in_l1_ball

# none has a slope above 1
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"softplus": F.softplus, "tanh": torch.tanh, "relu": torch.relu}
GROUPS = 8

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


class EquilibriumLayer(nn.Module):
    """The z of a given shape with z = cell(z, x), found from 0 or from where it was; for models of your own as well.

    A cell may have a method `tensors`, of what it reads in place of its parameters; it is called once per solve.
    """

    def __init__(self, cell: nn.Module, shape: Sequence[int], how: Equilibrium, warm_start: bool = True) -> None:
        super().__init__()
        self.cell, self.shape, self.how = cell, tuple(shape), how
        if warm_start:
            self.register_buffer(WARM_START, torch.empty(0, *shape, device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        names, values = zip(*_tensors(self.cell).items(), strict=True)

        def g(z: Tensor, x: Tensor, *values: Tensor) -> Tensor:
            return torch.func.functional_call(self.cell, dict(zip(names, values, strict=True)), (z, x))

        start: Tensor = getattr(self, WARM_START, x[:0])
        is_kept = start.shape[0] == x.shape[0] > 0  # else nobody keeps it from one step to the next
        if not is_kept:
            start = x.new_zeros(x.shape[0], *self.shape)
        # outside of training nobody would know whose error it is: there the values show that they are not finite
        z, _ = fixed_point(g, start, (x, *values), replace(self.how, strict=self.training))
        if is_kept:
            start.copy_(z.detach())
        return z


def _tensors(cell: nn.Module) -> dict[str, Tensor]:
    own = getattr(cell, "tensors", None)
    return dict(cell.named_parameters()) if own is None else own()


@dataclass(frozen=True)
class Solve:
    """Options of every model here: how the fixed point is found, and how a gradient passes it."""

    tolerance: float = 1e-3
    max_iterations: int = 30
    gradient: str = "jfb"  # or "neumann-k", "implicit"; see `fedtailor.numerics.equilibrium`
    warm_start: bool = True  # from where a sample's fixed point was in the epoch before

    def layer(self, cell: nn.Module, shape: Sequence[int]) -> EquilibriumLayer:
        how = Equilibrium(self.tolerance, self.max_iterations, gradient=self.gradient)
        return EquilibriumLayer(cell, shape, how, self.warm_start)


def takes_solve_options(model: Builder) -> Builder:
    """Put the fields of `Solve` into a model's signature in place of `**solve`: configurations and lists read it."""
    signature = inspect.signature(model)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(Solve).parameters.values()]
    shown: Any = model
    shown.__signature__ = signature.replace(parameters=[*own, *options])
    return model


class DenseCell(nn.Module):
    """phi(B z + x); with `project`, the rows of B lie in the l1 ball of radius `contraction`, so that z exists.

    B is projected where it is used, not after each step: then no trainer, average or dual step can leave the ball.
    """

    def __init__(self, width: int, activation: str, project: bool, contraction: float) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f'model.activation = "{activation}": {nearest(activation, ACTIVATIONS)}')
        if not 0 < contraction < 1:
            raise ConfigError(f"model.contraction = {contraction}: must be between 0 and 1")
        self.activation, self.project, self.contraction = ACTIVATIONS[activation], project, contraction
        # rows begin with absolute sums of about 1/2, inside the ball: projected from afar, few entries would be left
        self.weight = nn.Parameter(torch.empty(width, width, device="cpu").uniform_(-1 / width, 1 / width))

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": rows_in_l1_ball(self.weight, self.contraction) if self.project else self.weight}

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.activation(F.linear(z, self.weight) + x)


@takes_solve_options
class DEQMLP(nn.Module):
    """An equilibrium phi(Bz + Cx + b), a dense layer, and a last one, which is the head (FeDEQ, Figure 2)."""

    head = ("out",)

    def __init__(
        self,
        shape: Shape,
        outputs: int,
        width: int = 512,
        hidden: int = 128,
        activation: str = "softplus",
        project: bool = True,
        contraction: float = 0.95,
        **solve: Any,
    ) -> None:
        super().__init__()
        self.inject = nn.Linear(prod(shape), width)
        cell = DenseCell(width, activation, project, contraction)
        self.equilibrium = Solve(**solve).layer(cell, (width,))
        self.hidden = nn.Linear(width, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        z = self.equilibrium(self.inject(x.flatten(1)))
        return self.out(F.softplus(self.hidden(z)))


class ResidualCell(nn.Module):
    """Two convolutions between GroupNorms, beside the identity, into which x is injected."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, inner)
        self.conv2 = nn.Conv2d(inner, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, channels)
        self.norm3 = nn.GroupNorm(GROUPS, channels)
        for conv in (self.conv1, self.conv2):
            nn.init.normal_(conv.weight, std=0.01)  # small, so that the map contracts to begin with

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        u = self.norm1(F.softplus(self.conv1(z)))
        y = self.norm2(self.conv2(u) + x)
        return self.norm3(F.softplus(y + z))


@takes_solve_options
class DEQResNet(nn.Module):
    """Convolution, equilibrium residual block, dense layers; the head is the last layer.

    norm: "batch" or "group" after the stem and before the head. The block has GroupNorm: of batch statistics there
    would be no fixed point of a single sample.
    """

    head = ("out",)

    def __init__(
        self,
        shape: Shape,
        outputs: int,
        channels: int = 64,
        inner: int = 128,
        hidden: tuple[int, ...] = (256, 128),
        stride: int = 1,
        norm: str = "batch",
        **solve: Any,
    ) -> None:
        super().__init__()
        colours, height, width = shape
        if norm not in ("batch", "group"):
            raise ConfigError(f'model.norm = "{norm}": no such norm; {nearest(norm, ("batch", "group"))}')
        for name, value in (("channels", channels), ("inner", inner)):
            if value % GROUPS:
                raise ConfigError(f"model.{name} = {value}: must be a multiple of {GROUPS}")
        sides = tuple(_halved(-(-side // stride)) for side in (height, width))
        self.stem = nn.Conv2d(colours, channels, 3, stride, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(GROUPS, channels)
        self.equilibrium = Solve(**solve).layer(ResidualCell(channels, inner), (channels, *sides))
        widths = (channels * prod(map(_halved, sides)), *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head_norm = nn.BatchNorm1d(widths[-1]) if norm == "batch" else nn.LayerNorm(widths[-1])
        self.out = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem_norm(F.softplus(self.stem(x))), 3, 2, 1)
        x = F.max_pool2d(self.equilibrium(x), 3, 2, 1).flatten(1)
        for layer in self.hidden:
            x = F.softplus(layer(x))
        return self.out(self.head_norm(x))


def _halved(side: int) -> int:
    return (side + 1) // 2


@takes_solve_options
def deq_resnet_xs(
    shape: Shape, outputs: int, channels: int = 32, inner: int = 32, norm: str = "group", **solve: Any
) -> nn.Module:
    """DEQ-ResNet for two cores, 51 936 shared and 650 personal parameters for ten classes of 28x28."""
    return DEQResNet(shape, outputs, channels, inner, (64,), 2, norm, **solve)


@takes_solve_options
def deq_resnet_s(shape: Shape, outputs: int, norm: str = "batch", **solve: Any) -> nn.Module:
    """DEQ-ResNet-S of FeDEQ, 984 896 shared and 7 998 personal parameters for 62 classes of 28x28."""
    return DEQResNet(shape, outputs, 64, 128, (256, 128), 1, norm, **solve)


@takes_solve_options
def deq_resnet_m(shape: Shape, outputs: int, norm: str = "batch", **solve: Any) -> nn.Module:
    """DEQ-ResNet-M of FeDEQ, 2 725 120 shared and 1 290 personal parameters for ten classes of 3x32x32."""
    return DEQResNet(shape, outputs, 128, 256, (256, 128), 1, norm, **solve)


class TransformerCell(nn.Module):
    """Layers with the input injected before each; a norm after the last, without which the sum has no fixed point."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            z = layer(z + x)
        return self.norm(z)


@takes_solve_options
class DEQTransformer(nn.Module):
    """An equilibrium of causal layers over windows of character ids; the head is one more layer and the output.

    For 90 characters and windows of 80: 210 944 shared and 55 962 personal parameters. The output is of the last
    position. A vocabulary of 0 is as many characters as there are outputs.
    """

    head = ("last", "norm", "out")

    def __init__(
        self,
        shape: Shape,
        outputs: int,
        width: int = 64,
        heads: int = 4,
        layers: int = 4,
        vocabulary: int = 0,
        **solve: Any,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ConfigError(f"model.layers = {layers}: an equilibrium needs at least 1")
        self.embed = Embedding(shape, vocabulary or outputs, width)
        cell = TransformerCell(width, heads, layers)
        self.equilibrium = Solve(**solve).layer(cell, (*shape, width))
        self.last = Layer(width, heads)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.last(self.equilibrium(self.embed(x)))[:, -1]))
