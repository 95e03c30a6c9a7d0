"""The learned numbers of a Learn2pFed client: degrees lam and five scalars, as one vector, and how it takes a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree
from fedtailor.training.optimizers import adam_direction

Positive = Literal["exp", "relu"]
SCALARS = ("p", "rho", "eta", "gamma", "theta")


@dataclass(frozen=True)
class Learnables:
    """Which numbers are learned, and how: options of an algorithm that has `cells`."""

    positive: Positive = "exp"
    """How learned numbers are kept positive."""
    learned: tuple[str, ...] = ("lam",)
    """What is learned: lam, and any of p, rho, eta, gamma, theta."""
    lam: float = 1.0
    """Initial degree."""
    random_lam: bool = False
    """Initial degrees are `lam` times U(0, 1), drawn once for all clients and seeds (released code)."""
    weights: Literal["equal", "samples"] = "equal"
    """Initial p: the same for all clients, or n_i / N (paper)."""
    rho: float = 1.0
    """Initial rho, eta and gamma."""
    theta: float = 1.0
    """Initial dual step: 1 as in scaled ADMM, or rho as in the paper."""
    cells: int = 10
    """Exchanges with the server per round."""
    per_cell: bool = False
    """Learn separate numbers for every cell."""
    reach: float = 2.0
    """Steps and weights stay within this factor of their first values, that of the dual below its own: farther away
    the cells may diverge. 0 sets no bounds (paper)."""
    outer_lr: float = 0.3
    """Learning rate of the learned numbers."""
    lower_after: int = 0
    """Last round with this learning rate, counted from 0; a tenth of it from then on. 0: never (released code: 60)."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the learned numbers; sgd clips the gradient by the numbers of all clients to norm 1 (released
    code)."""

    @property
    def first_scalars(self) -> dict[str, float]:
        """Initial values; of p, relative to the client's weight."""
        return {"p": 1.0, "rho": self.rho, "eta": self.rho, "gamma": self.rho, "theta": self.theta}

    def first_numbers(self, like: Tensor) -> Tree:
        """Where learning starts, for parameters such as these."""
        lam = torch.full_like(like, self.lam)
        if self.random_lam:
            lam = lam * torch.from_numpy(stream("Learn2pFed", "degrees").random(like.shape)).to(like)
        return start(lam, self.first_scalars, self.positive, self.cells if self.per_cell else 0)

    def numbers(self, state: Tree, w: Tensor, cell: Tensor | int) -> Params:
        raw = state["learned"]["raw"]
        return positive_numbers(raw[cell] if self.per_cell else raw, w.shape, self.positive)

    def step(self, learned: Tree, gradient: Tensor, shrink: Tensor | None = None) -> Tree:
        """After one step along the gradient of the outer loss, which plain descent is given `shrink` to clip by; see
        `reach`."""
        steps = learned["steps"]
        lr = torch.full_like(steps, self.outer_lr)
        if self.lower_after:
            lr = torch.where(steps > self.lower_after, lr / 10, lr)
        lr = lr.reshape(lr.shape + (1,) * (gradient.dim() - lr.dim()))  # one client or a stack
        after = (
            adam(learned, gradient, lr, self.learned)
            if shrink is None
            else descend(learned, shrink * gradient, lr, self.learned)
        )
        if not self.reach or self.learned == ("lam",):
            return after
        return after | {"raw": bound_scalars(after["raw"], self.first_scalars, self.reach, self.positive)}

    def clipping(self, squared_norm: Tensor) -> Tensor | None:
        """The factor that clips a gradient of this squared norm, over all clients; None where nothing is clipped."""
        return None if self.optimizer == "adam" else 1 / squared_norm.sqrt().clamp(min=1)


def start(lam: Tensor, scalars: dict[str, float], positive: Positive, cells: int = 0) -> Tree:
    """Raw values (lam, then SCALARS) and the averages of Adam; with `cells`, one vector for each of them."""
    first = torch.cat([lam.flatten(), lam.new_tensor([scalars[k] for k in SCALARS])])
    raw = first.log() if positive == "exp" else first
    raw = raw.expand(cells, -1).clone() if cells else raw
    return {"raw": raw, "first": raw - raw, "second": raw - raw, "steps": (raw - raw).sum()}


def positive_numbers(raw: Tensor, shape: torch.Size, positive: Positive) -> Params:
    """The numbers, positive: lam of `shape`, scalars as [1, 1]. A degree of 0 is right, a step of 0 is not."""
    lam, scalars = degrees(raw), raw[..., -len(SCALARS) :]
    if positive == "exp":
        lam, scalars = lam.exp(), scalars.exp()
    else:
        lam, scalars = torch.relu(lam), scalars.clamp(min=1e-6)
    each = scalars[..., None, None].unbind(-3)
    return {"lam": lam.unflatten(-1, shape), **dict(zip(SCALARS, each, strict=True))}


def by_raw(raw: Tensor, bars: list[Params], positive: Positive) -> Tensor:
    """The derivative by raw values [clients, ...] from that by the numbers read from them, of each cell or of all."""
    rows = [torch.cat([b["lam"].flatten(1), *(b[k].flatten(1) for k in SCALARS)], dim=1) for b in bars]
    bar = torch.stack(rows, dim=1) if raw.dim() == 3 else rows[0]
    if positive == "exp":
        return bar * raw.exp()
    passes = torch.cat([degrees(raw) > 0, raw[..., -len(SCALARS) :] >= 1e-6], dim=-1)
    return bar * passes.to(bar.dtype)


def bound_scalars(raw: Tensor, first: dict[str, float], reach: float, positive: Positive) -> Tensor:
    """With scalars not farther than a factor from their first values; degrees are free, any of them is stable."""
    ends = raw.new_tensor([[first[k] / reach, first[k] * (reach if k != "theta" else 1)] for k in SCALARS])
    low, high = (ends.log() if positive == "exp" else ends).unbind(-1)
    return torch.cat([degrees(raw), raw[..., -len(SCALARS) :].clamp(low, high)], dim=-1)


def learned_entries(raw: Tensor, names: tuple[str, ...]) -> Tensor:
    """1 at the entries of raw that are learned."""
    lam = raw.new_full((raw.shape[-1] - len(SCALARS),), float("lam" in names))
    return torch.cat([lam, raw.new_tensor([float(k in names) for k in SCALARS])])


def degrees(raw: Tensor) -> Tensor:
    return raw[..., : -len(SCALARS)]


def pull_degrees(raw: Tensor, common: Tensor, pull: float) -> Tensor:
    return torch.cat([torch.lerp(degrees(raw), common, pull), raw[..., -len(SCALARS) :]], dim=-1)


def with_weight(raw: Tensor, p: Tensor, positive: Positive) -> Tensor:
    """With p at this value."""
    at = raw.shape[-1] - len(SCALARS) + SCALARS.index("p")
    value = (p.log() if positive == "exp" else p).to(raw.dtype)
    return torch.cat([raw[..., :at], value.expand(raw[..., at : at + 1].shape), raw[..., at + 1 :]], dim=-1)


def adam(learned: Tree, gradient: Tensor, lr: Tensor, names: tuple[str, ...]) -> Tree:
    """One step of Adam on the raw values of `names`; the others stay."""
    steps = learned["steps"] + 1
    at = steps.reshape(lr.shape)
    direction, first, second = adam_direction(gradient, learned["first"], learned["second"], at, beside=1e-12)
    raw = learned["raw"] - lr * learned_entries(gradient, names) * direction
    return {"raw": raw, "first": first, "second": second, "steps": steps}


def descend(learned: Tree, gradient: Tensor, lr: Tensor, names: tuple[str, ...]) -> Tree:
    """One step of plain gradient descent on the raw values of `names`."""
    raw = learned["raw"] - lr * learned_entries(gradient, names) * gradient
    return learned | {"raw": raw, "steps": learned["steps"] + 1}
