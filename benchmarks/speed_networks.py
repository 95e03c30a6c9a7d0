"""Networks as people bring them, beside a plain loop over the same batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed_core import LAYOUTS, Figure, Options, Ours, beside
from benchmarks.speed_limits import Clients, Round
from benchmarks.speed_tasks import LR
from fedtailor import algorithms, models
from fedtailor.core import task as tasks
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.task import Loss
from fedtailor.models.adapters import AdapterConfig
from fedtailor.training.arithmetic import Arithmetic, Precision
from fedtailor.training.solver import Solver

CLIENTS = 2  # one for each process of a small machine
GOAL = 1.05
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class VisionTransformer(nn.Module):
    """ViT-tiny of Touvron et al., 2021, for patches of 4 x 4."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int = 192, layers: int = 12) -> None:
        super().__init__()
        channels, height, _ = shape
        self.cut = nn.Conv2d(channels, width, 4, 4)
        self.place = nn.Parameter(torch.randn((height // 4) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.cut(x).flatten(2).mT + self.place).mean(1))


class TextEncoder(nn.Module):
    """A small encoder of tokens."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.place = nn.Parameter(torch.randn(*shape, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x) + self.place).mean(1))


class Recurrent(nn.Module):
    """An LSTM of torch over a window of numbers."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(shape[1], 128, num_layers=2, batch_first=True)
        self.out = nn.Linear(128, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class UNet(nn.Module):
    """Two convolutions on each of three levels, in two or three dimensions."""

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int = 16) -> None:
        super().__init__()
        self.is_flat = len(shape) == 3
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self._two(a, b) for a, b in pairwise([shape[0], *widths]))
        self.up = nn.ModuleList(self._two(a + b, a) for a, b in pairwise(widths))
        self.out = (nn.Conv2d if self.is_flat else nn.Conv3d)(width, outputs, 1)

    def _two(self, inputs: int, outputs: int) -> nn.Sequential:
        kind = nn.Conv2d if self.is_flat else nn.Conv3d
        layers: list[nn.Module] = []
        for before in (inputs, outputs):
            layers += [kind(before, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        pool = F.max_pool2d if self.is_flat else F.max_pool3d
        seen: list[Tensor] = []
        for level in self.down:
            x = level(pool(x, 2) if seen else x)
            seen.append(x)
        for level, same in zip(reversed(self.up), reversed(seen[:-1]), strict=True):
            x = level(torch.cat([F.interpolate(x, scale_factor=2), same], 1))
        return self.out(x)


class Masks:
    """Cross-entropy of every point of a mask."""

    kind = "own"
    metrics = ("loss",)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, target, reduction="none").flatten(1).mean(1)


@dataclass(frozen=True)
class Network:
    """A model, and its samples at every client."""

    model: str
    shape: tuple[int, ...]
    samples: int
    batch: int
    options: dict[str, Any]
    precision: Precision = "float32"
    adapter: AdapterConfig | None = None
    has_masks: bool = False
    tokens: int = 0

    def data(self) -> FederatedData:
        n, generator = CLIENTS * self.samples, torch.Generator().manual_seed(0)
        x = torch.randn(n, *self.shape, generator=generator)
        x = torch.randint(self.tokens, x.shape, generator=generator) if self.tokens else x
        y = torch.randint(10, (n,), generator=generator)
        y = (x[:, :1] > 0).to(x.dtype) if self.has_masks else y
        rows, few = (Rows(x[: CLIENTS * k], y[: CLIENTS * k], torch.arange(CLIENTS + 1) * k) for k in (self.samples, 1))
        kind = "own" if self.has_masks else "classification"
        names = tuple(f"c{i}" for i in range(CLIENTS))
        return FederatedData("noise", kind, names, rows, few, few, 1 if self.has_masks else 10)  # type: ignore[arg-type]

    def experiment(self) -> Experiment:
        data = self.data()
        model = models.build(
            self.model, self.shape, data.outputs, seed=0, options=dict(self.options), adapter=self.adapter
        )
        task = tasks.make(f"{HERE}:Masks" if self.has_masks else "classification", {})
        solver = Solver(lr=LR, batch_size=self.batch, arithmetic=Arithmetic(precision=self.precision))
        return Experiment(algorithms.make("fedavg", {}), model, data, solver, 0, task=task)


HERE = "benchmarks.speed_networks"
NETWORKS: dict[str, Network] = {
    "ResNet-18, BatchNorm": Network("resnet18", (3, 32, 32), 64, 16, {}),
    "ResNet-18, GroupNorm": Network("resnet18", (3, 32, 32), 64, 16, {"norm": "group"}),
    "ViT-tiny": Network(f"{HERE}:VisionTransformer", (3, 32, 32), 64, 16, {}),
    "transformer with LoRA": Network(
        f"{HERE}:TextEncoder", (64,), 64, 16, {}, adapter=AdapterConfig(targets=("*.linear1", "*.linear2")), tokens=1000
    ),
    "LSTM": Network(f"{HERE}:Recurrent", (64, 16), 128, 32, {}),
    "2D U-Net": Network(f"{HERE}:UNet", (3, 64, 64), 64, 8, {}, has_masks=True),
    "3D U-Net": Network(f"{HERE}:UNet", (1, 32, 32, 32), 24, 2, {"width": 8}, has_masks=True),
    "ResNet-18, GroupNorm, bfloat16": Network("resnet18", (3, 32, 32), 64, 16, {"norm": "group"}, "bfloat16"),
    "ViT-tiny, bfloat16": Network(f"{HERE}:VisionTransformer", (3, 32, 32), 64, 16, {}, "bfloat16"),
}


def loops(clients: Clients, module: nn.Module, loss: Loss, batch: int, precision: Precision) -> dict[str, Round]:
    """The same steps in plain torch, with two layouts of images in memory."""

    def made(way: str) -> Round:
        def laid_out(v: Tensor) -> Tensor:
            is_last = way == "channels_last" and v.dim() in LAST
            return v.to(memory_format=LAST[v.dim()]) if is_last else v

        net = copy.deepcopy(module).train()
        for v in net.parameters():
            v.data = laid_out(v.data)
        state = dict(net.state_dict())
        start = {k: v.clone() for k, v in state.items()}
        trained: list[Tensor] = [v for v in net.parameters() if v.requires_grad]

        def run() -> None:
            for x, y in clients:
                with torch.no_grad():
                    torch._foreach_copy_(list(state.values()), list(start.values()))
                for rows in torch.randperm(len(x)).split(batch):
                    with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
                        output = net(laid_out(x[rows]))
                    gradients = torch.autograd.grad(loss(output.float(), y[rows]).mean(), trained)
                    with torch.no_grad():
                        torch._foreach_add_(trained, list(gradients), alpha=-LR)

        return run

    return {way: made(way) for way in LAYOUTS}


def networks(options: Options) -> Iterator[Figure]:
    """A round of two clients; limits are the better layout with memory as the C library gives it, and kept."""
    for name, network in NETWORKS.items():
        network = replace(network, samples=4, batch=2) if options.small else network
        made = network.experiment()
        ours = Ours(made, options.engine)
        clients = [made.data.train.of(c) for c in range(CLIENTS)]
        for workers in (options.workers, options.keeping):
            workers.load(loops, clients, made.model.module, made.loss, network.batch, network.precision)
        title = f"F: {name}, {CLIENTS} clients x {network.samples}, batch {network.batch}"
        ways = LAYOUTS if len(network.shape) > 2 else LAYOUTS[:1]
        yield from beside(title, ours, ways, options, GOAL)[1]
