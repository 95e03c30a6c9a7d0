"""A causal transformer that foretells the next character of a text; the head is its last layer and the output.

Layers have the norm first (Xiong et al., ICML 2020). The products are written out: they run for a stack of clients and
have second derivatives, which the fused attention of torch has not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.errors import ConfigError

Shape = tuple[int, ...]  # of a sample


class Transformer(nn.Module):
    """Layers of causal attention over windows of character ids, 416 730 parameters for 90 characters and windows of 80.

    The output is of the last position. A vocabulary of 0 is as many characters as there are outputs.
    """

    head = ("last", "norm", "out")

    def __init__(
        self, shape: Shape, outputs: int, width: int = 64, heads: int = 4, layers: int = 8, vocabulary: int = 0
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ConfigError(f"model.layers = {layers}: a transformer needs at least 1")
        self.embed = Embedding(shape, vocabulary or outputs, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers - 1))
        self.last = Layer(width, heads)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(self.last(h)[:, -1]))


class Embedding(nn.Module):
    """Characters and their positions, both learned."""

    def __init__(self, shape: Shape, vocabulary: int, width: int) -> None:
        super().__init__()
        (length,) = shape
        self.character = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.character(x.long()) + self.position


class Layer(nn.Module):
    """Causal attention and a dense part of four times the width, each beside the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"model.width = {width}: must be a multiple of model.heads = {heads}")
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.read = nn.Linear(width, 3 * width)  # queries, keys and values
        self.write = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.write(self._attention(self.norm1(x)))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = self.read(x).unflatten(-1, (3, self.heads, -1)).transpose(-4, -2).unbind(-3)
        later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ value).movedim(-3, -2).flatten(-2)
