"""The tape that makes a round differentiable: a call to the clients is one node, and its backward a call again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.client import Call
from fedtailor.core.placed import Placed, in_order, outline
from fedtailor.core.trees import Tree, leaves, rebuild, tree_map

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation


class Tape:
    """Server-side autograd in which a call to the clients is one node, and its backward a call again."""

    def __init__(self, watched: Tree) -> None:
        self.watched = watched
        # threads through all calls, so that backward reaches them in reverse order even where no message links them
        self.start = torch.zeros((), requires_grad=True)
        self.token: Tensor = self.start

    def call(self, fed: Federation, call: Call) -> Placed:
        node = _Node(fed, call)
        with torch.enable_grad():
            self.token, *reply = _Apply.apply(node, self.token, *leaves(call.args))
        return Placed(fed.cohort, rebuild(node.reply, iter(reply)), fed.ranks)

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
        fed._count(len(fed.cohort), down, up=codec.size(call.reply_header, message))
        here = fed.ranks.mine(fed.cohort)
        totals: list[Tree] = [None] * len(call.args)
        parts: list[list[tuple[tuple[int, ...], Tree]]] = [[] for _ in call.args]
        for clients, args in fed.engine.pull_back(call.number, fed.cohort, tree):
            for i, (arg, own) in enumerate(zip(args, call.placed, strict=True)):
                if own:
                    parts[i].append((clients, arg))
                else:
                    totals[i] = arg if totals[i] is None else tree_map(torch.add, totals[i], arg)
        for i, (arg, own) in enumerate(zip(call.args, call.placed, strict=True)):
            if not own and totals[i] is None:  # no client of the cohort is on this rank
                totals[i] = tree_map(torch.zeros_like, arg)
        totals = fed.ranks.total(totals)  # the same message went to the clients of all ranks
        joined = [
            in_order(part, here, example) if own else total
            for part, total, own, example in zip(parts, totals, call.placed, message, strict=True)
        ]
        return leaves(tuple(joined))


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: _Node, token: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        ctx.node, ctx.token = node, token
        node.reply = node.fed._call(node.call).rows
        return token.clone(), *leaves(node.reply)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *cotangents: Tensor | None) -> Any:
        return None, torch.zeros_like(ctx.token), *ctx.node.backward(cotangents)
