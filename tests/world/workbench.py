"""What a stranger writes beside an algorithm: optimizers, samplers, and methods that are not quite right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor import COUNT, MODEL, Algorithm, ClientContext, Federation, Model, Params, Tree, on_client
from fedtailor.errors import ConfigError


def make(params: Any, lr: float) -> Any:
    """As a torch program has it, which is not how an optimizer is called here."""
    return torch.optim.SGD(params, lr=lr)


def signs(options: Any, param: Tensor, gradient: Tensor, memory: list[Tensor], number: Any) -> Tensor:
    """A step of the same size in every entry."""
    return gradient.sign()


def power_of_choice(candidates: Any) -> list[int]:
    """Of twice as many clients as wanted, drawn by size, those whose loss was largest when they were evaluated."""
    share = candidates.samples / candidates.samples.sum()
    some = candidates.random.choice(len(share), min(2 * candidates.wanted, len(share)), replace=False, p=share)
    losses = candidates.validation.get("loss")
    if losses is None:  # nobody was evaluated yet
        return some[: candidates.wanted].tolist()
    return sorted(some.tolist(), key=lambda c: (-losses[c], c))[: candidates.wanted]


def twice_the_first(candidates: Any) -> Sequence[int]:
    return [0] * candidates.wanted


@dataclass(frozen=True)
class Average(Algorithm):
    """FedAvg, from which the others differ in one place each."""

    def server_init(self, model: Model) -> Tree:
        return model.params

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, (me.sgd(w), me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(*fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w


@dataclass(frozen=True)
class ForClasses(Average):
    """Indexes by label."""

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        hardest = me.train.mask.new_ones(3)[me.train.y].mean()
        return me.state, (me.sgd(w, lr=0.1 * hardest), me.n)


@dataclass(frozen=True)
class ByRounding(Average):
    """Compares two numbers that are equal but for rounding."""

    def check(self, model: Model, task: str) -> None:
        if "hidden.0.weight" not in model.params:
            raise ConfigError("looks at the first dense layer")

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        new = me.sgd(w)
        some = new["hidden.0.weight"]
        one, other = some @ some.T, (some[:, None] * some[None]).sum(-1)
        return me.state, ({k: v + 0.01 * (one > other).sum() for k, v in new.items()}, me.n)


@dataclass(frozen=True)
class BesideTheModel(Average):
    """Predicts with something that is no parameter, as prototypes are; defines nothing for newcomers."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"shift": me.model.params["out.bias"]}

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        f = me.features(w)
        shift = (f * me.train.mask[:, None]).sum() / me.n * torch.ones_like(me.state["shift"])
        return {"shift": shift}, (me.sgd(w), me.n)

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w | {"proto.c": me.state["shift"]}

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        features = model.features(personal, x)
        return features @ personal["out.weight"].T + personal["out.bias"] + personal["proto.c"]


@dataclass(frozen=True)
class ExplodesWithMany(Average):
    """Sends what nobody can use where there are many samples."""

    @on_client(sends=(MODEL, COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, ({k: v * torch.where(me.n > 20, torch.inf, 1) for k, v in me.sgd(w).items()}, me.n)
