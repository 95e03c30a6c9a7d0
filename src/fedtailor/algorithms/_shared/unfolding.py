"""Server-side arithmetic of learned averages: what a rule sees of clients, a step of Adam."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.core.experiment import LocalSolver
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, flat, unflat
from fedtailor.errors import ConfigError
from fedtailor.training.optimizers import adam_direction

FEATURES = 10


@dataclass(frozen=True)
class Average:
    """One weighted average on the server and what its derivative needs; rows are the clients that were asked."""

    w: Params  # the new common model
    share: Tensor  # [clients] weights
    apart: Tensor  # [clients, parameters] each client's model minus the new one; 0 for who has no weight
    slope: Tensor  # [parameters] sum of the gradients of the losses on the way; empty if these are not in L
    answers: Tensor  # [all clients] how often each has answered so far


def average(
    w: Params,
    moves: Tensor,
    score: Tensor,
    counts: Tensor,
    answers: Tensor,
    rates: Tensor | None,
    *,
    through: bool,
) -> Average:
    """w + sum share * move, with share = score / sum of scores over those that count.

    A move of plain SGD is minus its step size, in `rates`, times the sum of its gradients. Derivatives by the weights
    flow into w only if `through`; else local moves are constants of a first-order scheme.
    """
    score = score * counts.to(score.dtype)
    share = score / score.sum().clamp(min=torch.finfo(score.dtype).tiny)
    used = (share if through else share.detach()).to(moves.dtype)
    move = used @ moves
    apart = (moves - move).detach() * counts[:, None].to(moves.dtype)
    new = unflat(flat(w) + move, w)
    if rates is None:
        slope = moves.new_empty(0)
    else:
        per_rate = torch.where(rates > 0, -1 / rates, 0).to(moves.dtype)  # who has no samples takes no steps
        slope = per_rate @ moves.detach()
    return Average(new, share, apart, slope, answers)


def first_order(steps: list[Average], theta: Tensor, slope: Tree) -> Tensor:
    """The derivative of L by theta with local moves as constants; `slope` is that of L at the end by the last model."""
    a, pulls = flat(slope), []
    for step in reversed(steps):
        pulls.append((step.apart @ a).to(theta.dtype))  # dL / dTheta
        a = a + step.slope if len(step.slope) else a
    return torch.autograd.grad([step.share for step in reversed(steps)], theta, pulls)[0]


def variance(steps: list[Average]) -> dict[str, Tensor]:
    """Mean over clients of the variance of their weights over rounds, (28), under its name in reports."""
    return {"variance_of_weights": torch.stack([step.share.detach() for step in steps]).var(0, correction=0).mean()}


def start(n: Tensor, horizon: int, weights: str, given: tuple[float, ...]) -> Tree:
    """theta = sqrt(n / N), the weights of FedAvg; a rule starts there as well, unless theta is given."""
    theta = (n / n.sum()).sqrt().repeat(horizon, 1) if weights == "table" else n.new_zeros(FEATURES)
    if given:
        if len(given) != theta.numel():
            wanted = f"{horizon} rounds x {len(n)} clients" if weights == "table" else f"{FEATURES} of a rule"
            raise ConfigError(f"algorithm.theta: {len(given)} numbers; {wanted} expected")
        theta = n.new_tensor(given).reshape(theta.shape)
    lowest = theta.new_full((), torch.inf)
    return {"learned": learnable(theta), "theta": theta, "lowest": lowest, "answers": torch.zeros_like(n)}


def take_step(server: Tree, gradient: Tensor, loss: Tensor, lr: float, *, keep_best: bool) -> Tree:
    """What is learned after a step of Adam, and the theta to use: the newest, or that of the lowest loss."""
    before, after = server["learned"], adam(server["learned"], gradient, lr)
    if not keep_best:
        return {"learned": after, "theta": after["x"]}
    loss = loss.detach().to(gradient.dtype)
    return {"learned": after} | ({"theta": before["x"], "lowest": loss} if loss < server["lowest"] else {})


def moves(
    w: Params, models: Params | None, at: Tensor, rows: Sequence[int], here: Collection[int]
) -> tuple[Tensor, Tensor]:
    """How far the model of each client of `rows` is from w [rows, parameters], and whether it arrived; 0 if not.

    `models` are those of the clients at the places `at` of `rows`.
    """
    arrived = at.new_tensor([c in here for c in rows], dtype=torch.bool)
    far = flat(w).new_zeros(len(rows), sum(v.numel() for v in w.values()))
    if models is None:
        return far, arrived
    far = far.index_copy(0, at, flat(models, stacked=True) - flat(w))
    return far * arrived[:, None].to(far.dtype), arrived


def place_losses(losses: Tensor | None, at: Tensor, count: int, like: Tensor) -> Tensor:
    """A number for each of so many clients, 0 for those that told none."""
    none = like.new_zeros(count)
    return none if losses is None else none.index_copy(0, at, losses.detach())


def check(gradient: str, outer: str, mu: float, model: Model) -> None:
    """Refuse what has no derivative."""
    if outer == "path" and mu:
        raise ConfigError('algorithm.outer = "path": with mu a move is no sum of gradients; use "final" or "holdout"')
    if outer == "path" and model.has_common_statistics:
        raise ConfigError('algorithm.outer = "path": statistics move by no gradient; set model.buffers = "private"')
    if gradient == "exact" and outer == "path":
        raise ConfigError('algorithm.outer = "path" has a first-order gradient only; use "final" or "holdout"')


def check_solver(outer: str, solver: LocalSolver) -> None:
    """The path's gradients are read off moves."""
    if outer == "path" and not solver.is_plain:
        raise ConfigError(
            'algorithm.outer = "path" reads gradients off a client\'s move: use plain sgd in [local] (no momentum, '
            'weight_decay or clip), or outer = "final" or "holdout"'
        )


def scores(
    theta: Tensor,
    moves: Tensor,
    loss: Tensor,
    n: Tensor,
    rows: Sequence[int],
    answers: Tensor,
    t: int,
    horizon: int,
) -> Tensor:
    """What weights are proportional to: theta^2 of a table, n exp(features' theta) of a rule."""
    if theta.dim() == 2:
        return theta[t, rows].square()
    return n * (client_features(moves, loss, n, rows, answers, t, horizon) @ theta).exp()


def client_features(
    moves: Tensor, loss: Tensor, n: Tensor, rows: Sequence[int], answers: Tensor, t: int, horizon: int
) -> Tensor:
    """Per client: size, loss, length of its move, angle to the mean move, participation; each also times the round.

    All are relative to the clients' mean, so that they say the same in another federation. `loss` is a sum.
    """
    moves, loss = moves.detach(), loss / n.clamp(min=1).to(loss.dtype)
    mean = (n / n.sum()).to(moves.dtype) @ moves
    length = moves.norm(dim=1)
    cosine = (moves @ mean) / (length * mean.norm()).clamp(min=torch.finfo(moves.dtype).tiny)
    each = [_relative(x.detach().to(n.dtype)) for x in (n, loss, length)]
    each += [x.to(n.dtype) - x.mean() for x in (cosine, answers[rows] / max(t, 1))]
    now = torch.stack(each, dim=1)
    return torch.cat([now, t / horizon * now], dim=1)


def _relative(x: Tensor) -> Tensor:
    return x / x.mean().clamp(min=torch.finfo(x.dtype).tiny) - 1


def adam(state: Tree, gradient: Tensor, lr: float) -> Tree:
    """One step on state["x"]; the averages are kept beside it."""
    steps = state["steps"] + 1
    direction, first, second = adam_direction(gradient, state["first"], state["second"], steps, beside=1e-8)
    return {"x": state["x"] - lr * direction, "first": first, "second": second, "steps": steps}


def learnable(x: Tensor) -> Tree:
    """Something to learn, before the first step."""
    return {"x": x, "first": torch.zeros_like(x), "second": torch.zeros_like(x), "steps": x.new_zeros(())}
