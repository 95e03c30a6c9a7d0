"""Server-side arithmetic of learned averages: trees as vectors, what a rule sees of clients, a step of Adam."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.core.trees import Params, Tree, leaves, rebuild

FEATURES = 10


@dataclass(frozen=True)
class Average:
    """One weighted average on the server and what its derivative needs; rows are the clients that were asked."""

    w: Params  # the new common model
    share: Tensor  # [clients] weights
    apart: Tensor  # [clients, parameters] each client's model minus the new one; 0 for who has no weight
    moved: Tensor  # [parameters] sum of the clients' moves
    answers: Tensor  # [all clients] how often each has answered so far


def average(w: Params, moves: Tensor, score: Tensor, counts: Tensor, answers: Tensor, *, through: bool) -> Average:
    """w + sum share * move, with share = score / sum of scores over those that count.

    Derivatives by the weights flow into w only if `through`; else local moves are constants of a first-order scheme.
    """
    score = score * counts.to(score.dtype)
    share = score / score.sum().clamp(min=torch.finfo(score.dtype).tiny)
    used = (share if through else share.detach()).to(moves.dtype)
    move = used @ moves
    apart = (moves - move).detach() * counts[:, None].to(moves.dtype)
    new = like(w, vector(w) + move)
    return Average(new, share, apart, moves.detach().sum(0), answers)


def vector(tree: Tree, *, stacked: bool = False) -> Tensor:
    """All numbers of a tree in a row, of each client if it is stacked."""
    return torch.cat([leaf.flatten(1 if stacked else 0) for leaf in leaves(tree)], dim=-1)


def like(tree: Params, numbers: Tensor) -> Params:
    """The inverse of `vector`."""
    each = leaves(tree)
    parts = numbers.split([leaf.numel() for leaf in each])
    return rebuild(tree, (part.reshape(leaf.shape) for part, leaf in zip(parts, each, strict=True)))


def seen(moves: Tensor, n: Tensor, loss: Tensor, taken_part: Tensor, time: float) -> Tensor:
    """Per client: size, loss, length of its move, angle to the mean move, participation; each also times the round.

    All are relative to the clients' mean, so that they say the same in another federation.
    """
    moves = moves.detach()
    mean = (n / n.sum()).to(moves.dtype) @ moves
    length = moves.norm(dim=1)
    cosine = (moves @ mean) / (length * mean.norm()).clamp(min=torch.finfo(moves.dtype).tiny)
    each = [_relative(x.detach().to(n.dtype)) for x in (n, loss, length)]
    each += [x.to(n.dtype) - x.mean() for x in (cosine, taken_part)]
    now = torch.stack(each, dim=1)
    return torch.cat([now, time * now], dim=1)


def _relative(x: Tensor) -> Tensor:
    return x / x.mean().clamp(min=torch.finfo(x.dtype).tiny) - 1


def adam(state: Tree, gradient: Tensor, lr: float) -> Tree:
    """One step on state["x"]; the averages are kept beside it."""
    steps = state["steps"] + 1
    first = torch.lerp(state["first"], gradient, 0.1)
    second = torch.lerp(state["second"], gradient.square(), 0.001)
    step = (first / (1 - 0.9**steps)) / ((second / (1 - 0.999**steps)).sqrt() + 1e-8)
    return {"x": state["x"] - lr * step, "first": first, "second": second, "steps": steps}


def learnable(x: Tensor) -> Tree:
    """Something to learn, before the first step."""
    return {"x": x, "first": torch.zeros_like(x), "second": torch.zeros_like(x), "steps": x.new_zeros(())}
