"""FedAvg written down in plain PyTorch: full batches, one step a round. And the modules that the tests train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor import FederatedData
from fedtailor.core.random import seeded, stream, torch_stream
from fedtailor.core.trees import tree_map


def fedavg(
    module: nn.Module,
    data: FederatedData,
    loss: Callable[[Any, Tensor], Tensor],
    *,
    rounds: int,
    lr: float,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    schedule: Callable[[int], float] = lambda round: 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The average after some rounds."""
    sizes = data.train.sizes.tolist()
    for round in range(1, rounds + 1):
        trained = []
        for i, client in enumerate(data.clients):
            own = copy.deepcopy(module).train()
            steps = optimizer(own.parameters(), lr=lr * schedule(round))
            x, y = data.train.of(i)
            order = stream(seed, round, 0, client, "batches", 0).permutation(sizes[i])  # dropout falls on places
            x, y = tree_map(lambda v, order=order: v[order], (x, y))
            with seeded(seed, round, 0, client, "training", 0):
                outputs = own(**x) if isinstance(x, dict) else own(x)
            loss(outputs, y).mean().backward()
            steps.step()
            trained.append(own.state_dict())
        mean = {k: sum(n * t[k] for n, t in zip(sizes, trained, strict=True)) / sum(sizes) for k in trained[0]}
        module.load_state_dict(mean)
    return dict(module.named_parameters())


def begun(kind: Callable[..., nn.Module], shape: Any, outputs: int, seed: int = 0) -> nn.Module:
    """A module with the initial values of a run."""
    with torch_stream(seed, "model"):
        return kind(shape, outputs)


class Encoder(nn.Module):
    """A transformer encoder that reads token ids and a mask of what is not padding."""

    head = ("out",)

    def __init__(self, shape: dict[str, tuple[int, ...]], outputs: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(8, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.layers(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        weight = attention_mask[..., None].to(h.dtype)
        return self.out((h * weight).sum(1) / weight.sum(1))


class Dropped(nn.Module):
    """Dropout as a layer and as a function."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first, self.drop, self.out = nn.Linear(shape[0], 6), nn.Dropout(0.5), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.first(x)))
        return self.out(nn.functional.dropout(h, 0.2, self.training))


class Layered(nn.Module):
    """A small net for any number of outputs."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(shape[0], 6), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


class TwoInputs(nn.Module):
    """Two inputs by name, two outputs side by side."""

    head = ("out",)

    def __init__(self, shape: dict[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__()
        self.left = nn.Linear(shape["left"][0], 4)
        self.right = nn.Linear(shape["right"][0], 4)
        self.out = nn.Linear(4, outputs)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(torch.tanh(self.left(left) + self.right(right)))


class Flat(Dropped):
    """The same for images."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__((int(torch.tensor(shape).prod()),), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))
