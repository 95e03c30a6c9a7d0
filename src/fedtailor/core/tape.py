"""The tape that makes a round differentiable: a call to the clients is one node, and its backward a call again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtailor.core import calling, codec
from fedtailor.core.algorithm import reply_example
from fedtailor.core.client import Call
from fedtailor.core.engine import Taping
from fedtailor.core.per_client import PerClient, in_order, outline
from fedtailor.core.trees import Tree, leaves, rebuild, tree_map

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation


class Tape:
    """Server-side autograd in which a call to the clients is one node, and its backward a call again."""

    def __init__(self, watched: Tree, like: Tensor) -> None:
        self.watched = watched
        # threads through all calls, so that backward reaches them in reverse order even where no message links them
        self.start = like.new_zeros((), requires_grad=True)
        self.token: Tensor = self.start

    def call(self, fed: Federation, call: Call) -> PerClient:
        node = _Node(fed, call)
        with torch.enable_grad():
            self.token, *reply = _Apply.apply(node, self.token, *leaves(call.args))
        rows, experiment = rebuild(node.reply, iter(reply)), fed.engine.experiment
        example = reply_example(experiment.algorithm, call.function, experiment.model)
        return PerClient.of_call(fed.present, rows, fed.group, call, example)

    def backward(self, loss: Tensor) -> Tree:
        watched = leaves(self.watched)
        gradients = torch.autograd.grad(loss, [self.start, *watched], allow_unused=True)
        filled = (torch.zeros_like(w) if g is None else g for w, g in zip(watched, gradients[1:], strict=True))
        return rebuild(self.watched, filled)


@dataclass
class _Node:
    fed: Federation
    call: Call
    reply: Tree = None

    def backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        fed, call = self.fed, self.call
        filled = [torch.zeros_like(v) if c is None else c for v, c in zip(leaves(self.reply), cotangents, strict=True)]
        tree = rebuild(self.reply, iter(filled))
        down = codec.size(call.reply_header, tree, stacked=True)
        message = outline(call.args, call.placed)
        fed.traffic.count(len(fed.present), down, up=codec.size(call.reply_header, message))
        here = fed.group.mine(fed.present)
        totals: list[Tree] = [None] * len(call.args)
        parts: list[list[tuple[tuple[int, ...], Tree]]] = [[] for _ in call.args]
        assert isinstance(fed.engine, Taping)
        for clients, args in fed.engine.pull_back(call.number, fed.present, tree):
            for i, (arg, own) in enumerate(zip(args, call.placed, strict=True)):
                if own:
                    parts[i].append((clients, arg))
                else:
                    totals[i] = arg if totals[i] is None else tree_map(torch.add, totals[i], arg)
        for i, (arg, own) in enumerate(zip(call.args, call.placed, strict=True)):
            if not own and totals[i] is None:  # no client of the cohort is on this rank
                totals[i] = tree_map(torch.zeros_like, arg)
        totals = fed.group.total(totals)  # the same message went to the clients of all ranks
        joined = [
            in_order(part, here, example) if own else total
            for part, total, own, example in zip(parts, totals, call.placed, message, strict=True)
        ]
        return leaves(tuple(joined))


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: _Node, token: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        ctx.node, ctx.token = node, token
        node.reply = calling.all_replies(node.fed, node.call)
        return token.clone(), *leaves(node.reply)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *cotangents: Tensor | None) -> Any:
        return None, torch.zeros_like(ctx.token), *ctx.node.backward(cotangents)
