"""A network of the server that makes the parameters of a client's model from a short vector."""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.model import Model
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree


def start(model: Model, embedding: int, hidden: int, *key: str | int) -> Tree:
    """Two hidden layers and, for each parameter, a linear layer whose bias begins at the model's initial value."""
    draw = stream(*key)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(draw.normal(size=shape)).to(model.like)

    def layer(outputs: int, inputs: int) -> Params:
        weight = normal(outputs, inputs) * (2 / max(inputs, 1)) ** 0.5
        return {"weight": weight, "bias": model.like.new_zeros(outputs)}

    out = {}
    for k, v in sorted(model.trainable.items()):
        out[k] = {"weight": normal(v.numel(), hidden) * v.std(correction=0), "bias": v.flatten()}
    return {"first": layer(hidden, embedding), "second": layer(hidden, hidden), "out": out}


def generate(phi: Tree, v: Tensor, model: Model) -> Params:
    def linear(layer: Params, x: Tensor) -> Tensor:
        return layer["weight"] @ x + layer["bias"]

    units = linear(phi["second"], linear(phi["first"], v).relu()).relu()
    units = units / max(len(units), 1) ** 0.5  # so that how fast it learns does not depend on their number
    return {k: linear(phi["out"][k], units).reshape(p.shape) for k, p in model.trainable.items()}
