"""Learned positive numbers of a client, such as degrees and steps, and how they take a step."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedtailor.core.trees import Params, Tree, tree_map

Positive = Literal["exp", "relu"]


def start(first: Params, positive: Positive, cells: int = 0) -> Tree:
    """Raw values and the averages of Adam; with `cells`, one value for each of them."""
    raw = {k: x.log() if positive == "exp" else x.clone() for k, x in first.items()}
    if cells:
        raw = {k: x.expand(cells, *x.shape).clone() for k, x in raw.items()}
    zeros = tree_map(torch.zeros_like, raw)
    return {"raw": raw, "first": zeros, "second": zeros, "steps": torch.zeros_like(raw[next(iter(raw))].sum())}


def read(learned: Tree, positive: Positive, cell: int | Tensor | None = None) -> Params:
    """The numbers, positive; of one cell if each cell has its own. A degree of 0 is right, a step of 0 is not."""
    raw = learned["raw"] if cell is None else {k: x[cell] for k, x in learned["raw"].items()}
    if positive == "exp":
        return {k: x.exp() for k, x in raw.items()}
    return {k: torch.relu(x) if k == "lam" else x.clamp(min=1e-6) for k, x in raw.items()}


def adam(learned: Tree, gradient: Params, lr: float, names: tuple[str, ...]) -> Tree:
    """One step of Adam on the raw values of `names`; the others stay."""
    steps: Tensor = learned["steps"] + 1
    first = {k: 0.9 * m + 0.1 * gradient[k] for k, m in learned["first"].items()}
    second = {k: 0.999 * u + 0.001 * gradient[k].square() for k, u in learned["second"].items()}
    raw = {}
    for k, x in learned["raw"].items():
        direction = (first[k] / (1 - 0.9**steps)) / ((second[k] / (1 - 0.999**steps)).sqrt() + 1e-12)
        raw[k] = x - lr * direction if k in names else x
    return {"raw": raw, "first": first, "second": second, "steps": steps}


def descend(learned: Tree, gradient: Params, lr: float, names: tuple[str, ...], clip: float = 1.0) -> Tree:
    """One step of plain gradient descent, the gradient no longer than `clip`."""
    norm = sum(gradient[k].square().sum() for k in names) ** 0.5
    scale = (clip / norm.clamp(min=clip)) * lr
    raw = {k: x - scale * gradient[k] if k in names else x for k, x in learned["raw"].items()}
    return learned | {"raw": raw, "steps": learned["steps"] + 1}
