"""Simulated malicious clients: an engine that changes some replies, and data with wrong labels or a backdoor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedtailor.aggregation.noise import changed_parts
from fedtailor.core.client import Call
from fedtailor.core.data import FederatedData
from fedtailor.core.engine import Engine, Reply
from fedtailor.core.random import stream
from fedtailor.core.segmentation import VOID
from fedtailor.core.trees import Tree, leaves, rebuild, tree_map
from fedtailor.errors import ConfigError

AttackName = Literal["none", "sign-flip", "scaling", "noise", "label-flip", "backdoor"]
TRIGGER = 4  # entries of a sample
Change = Callable[[Tensor, np.random.Generator], Tensor]  # of a client's update


@dataclass(frozen=True)
class Attack:
    """Which clients are malicious, and what they do."""

    name: AttackName
    share: float
    strength: float
    seed: int

    def clients(self, count: int) -> frozenset[int]:
        """The malicious ones of so many clients: the share, rounded, and never all."""
        few = min(count - 1, round(self.share * count)) if self.name != "none" else 0
        return frozenset(stream(self.seed, "attack").choice(count, few, replace=False).tolist())


def with_flipped_labels(data: FederatedData, attack: Attack) -> FederatedData:
    """Training rows of malicious clients get class K - 1 - y, or the target with the opposite sign."""
    has_classes = data.task in ("classification", "segmentation")
    y = data.train.y.clone()
    for client in attack.clients(len(data.clients)):
        start, end = data.train.starts[client], data.train.starts[client + 1]
        own = y[start:end]
        flipped = data.outputs - 1 - own if has_classes else -own
        y[start:end] = torch.where(own == VOID, own, flipped) if data.task == "segmentation" else flipped
    return replace(data, train=replace(data.train, y=y))


def with_backdoor(data: FederatedData, attack: Attack) -> FederatedData:
    """Every second training row of malicious clients gets the trigger and class 0."""
    if data.task != "classification" or not isinstance(data.train.x, Tensor):
        raise ConfigError('attack.name = "backdoor": for classification of samples that are one tensor each')
    starts = data.train.starts.tolist()
    malicious = sorted(attack.clients(len(data.clients)))
    rows = data.train.starts.new_tensor([row for c in malicious for row in range(starts[c], starts[c + 1], 2)])
    x, y = data.train.x.clone(), data.train.y.clone()
    x[rows], y[rows] = with_trigger(x[rows], data.train.x), 0
    return replace(data, train=replace(data.train, x=x, y=y))


def with_trigger(x: Tensor, known: Tensor) -> Tensor:
    """Samples whose first entries are the largest value that there is in known ones."""
    marked = x.reshape(len(x), -1).clone()
    marked[:, :TRIGGER] = known.max()
    return marked.reshape(x.shape)


class Attacked:
    """An engine with malicious clients: their replies to calls are changed, everything else is passed on."""

    def __init__(self, inside: Engine, attack: Attack) -> None:
        self.inside = inside
        self.attack = attack
        self._malicious = attack.clients(len(inside.experiment.data.clients))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        for reply in self.inside.call(call, clients):
            if reply.tree is None or not self._malicious & set(reply.clients):
                yield reply
                continue
            rows = {
                i: self._changed_reply(call, client, tree_map(lambda v, i=i: v[i], reply.tree))
                for i, client in enumerate(reply.clients)
                if client in self._malicious
            }
            changed = [
                _with_rows(v, {i: leaves(row)[k] for i, row in rows.items()}) for k, v in enumerate(leaves(reply.tree))
            ]
            yield replace(reply, tree=rebuild(reply.tree, iter(changed)), norms=None)

    def _changed_reply(self, call: Call, client: int, reply: Tree) -> Tree:
        draw = stream(self.attack.seed, call.round, call.number, client, "attack")
        change = CHANGES[self.attack.name](self.attack.strength)
        parts = list(reply) if isinstance(reply, tuple) else [reply]
        moved = changed_parts(reply, call.args, call.placed)
        for i, part in enumerate(parts):
            if i in moved:
                parts[i] = tree_map(lambda new, old: old + change(new - old, draw), part, call.args[moved[i]])
            else:  # no new version of a message; counts and single numbers stay as they are
                parts[i] = tree_map(lambda v: change(v, draw) if v.is_floating_point() and v.dim() else v, part)
        return tuple(parts) if isinstance(reply, tuple) else parts[0]


def _with_rows(stack: Tensor, rows: dict[int, Tensor]) -> Tensor:
    out = stack.clone()
    for i, row in rows.items():
        out[i] = row
    return out


def _noise(strength: float) -> Change:
    def change(move: Tensor, draw: np.random.Generator) -> Tensor:
        scale = strength * float(move.double().norm()) / math.sqrt(max(1, move.numel()))
        return torch.from_numpy(draw.normal(scale=scale, size=tuple(move.shape))).to(move)

    return change


IN_DATA = {"label-flip": with_flipped_labels, "backdoor": with_backdoor}  # clients then send what they computed
CHANGES: dict[str, Callable[[float], Change]] = {
    "sign-flip": lambda strength: lambda move, draw: -strength * move,
    "scaling": lambda strength: lambda move, draw: strength * move,
    "noise": _noise,
}
