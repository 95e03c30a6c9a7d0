"""The tape that makes a round differentiable: a call to the clients is one node, and its backward a call again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.reduce import Call
from fedtailor.core.trees import Tree, leaves, rebuild

Send = Callable[[Call], Tree]  # a call -> the replies of all clients, stacked
PullBack = Callable[[Call, Tree], tuple[Tree, ...]]  # a call and the cotangent of its replies -> that of its message


class Tape:
    """Server-side autograd in which a call to the clients is one node."""

    def __init__(self, watched: Tree, like: Tensor, send: Send, pull_back: PullBack) -> None:
        self.watched = watched
        self._send, self._pull_back = send, pull_back
        # threads through all calls, so that backward reaches them in reverse order even where no message links them
        self._start = like.new_zeros((), requires_grad=True)
        self._token: Tensor = self._start

    def call(self, call: Call) -> Tree:
        """The replies to a call, stacked, as tensors that can be differentiated."""
        node = _Node(call, self._send, self._pull_back)
        with torch.enable_grad():
            self._token, *reply = _Apply.apply(node, self._token, *leaves(call.args))
        return rebuild(node.reply, iter(reply))

    def backward(self, loss: Tensor) -> Tree:
        """The gradient of `loss` by what is watched; on the way every call is pulled back."""
        watched = leaves(self.watched)
        gradients = torch.autograd.grad(loss, [self._start, *watched], allow_unused=True)
        filled = (torch.zeros_like(w) if g is None else g for w, g in zip(watched, gradients[1:], strict=True))
        return rebuild(self.watched, filled)


@dataclass
class _Node:
    call: Call
    send: Send
    pull_back: PullBack
    reply: Tree = None


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, node: _Node, token: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        ctx.node, ctx.token = node, token
        node.reply = node.send(node.call)
        return token.clone(), *leaves(node.reply)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *cotangents: Tensor | None) -> Any:
        node = ctx.node
        pairs = zip(leaves(node.reply), cotangents, strict=True)
        reply = rebuild(node.reply, (torch.zeros_like(v) if c is None else c for v, c in pairs))
        return None, torch.zeros_like(ctx.token), *leaves(node.pull_back(node.call, reply))
