"""Bytes and trips of training, counted as messages would be serialised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.reduce import Call, outline, row
from fedtailor.core.trees import Tree, is_ragged


@dataclass
class Traffic:
    """Bytes are summed over clients, trips are counted once per call."""

    up: int = 0
    down: int = 0
    trips: int = 0

    def count(self, clients: int, down: int, up: int, trips: int = 1) -> None:
        """So many trips of so many clients, each with this many bytes down and up."""
        self.trips += trips
        self.down += trips * clients * down
        self.up += trips * clients * up


class Exchange(NamedTuple):
    """Calls that a fused round stands for."""

    function: str
    message: tuple[Tree, ...]
    times: int
    taped: bool


class FusedRound(NamedTuple):
    """What a round computed on all clients' states at once came to."""

    state: Tree  # private states, stacked
    server: Tree
    largest: Tensor  # norm of the largest reply that a client would have sent
    exchanges: Sequence[Exchange]


def bytes_down(call: Call, clients: int) -> int:
    """Of a call to so many clients; only ragged messages differ in length."""
    if is_ragged(call.args):
        return sum(codec.size(call.header, row(call.args, call.placed, i)) for i in range(clients))
    return clients * codec.size(call.header, outline(call.args, call.placed))


def count_fused(traffic: Traffic, exchange: Exchange, reply: int, *, round: int, first_call: int, clients: int) -> None:
    """What the calls of a fused round would have sent; `reply` is the length of a reply without its header."""
    function, message, times, taped = exchange
    request = codec.tree_size(message)
    for digits, calls in Counter(len(str(first_call + i)) for i in range(times)).items():
        # the length of a header depends on its numbers by their digits only
        call = Call(function, round, 10 ** (digits - 1), message, (False,) * len(message), taped)
        request_header, reply_header = codec.header_size(call.header), codec.header_size(call.reply_header)
        traffic.count(clients, down=request_header + request, up=reply_header + reply, trips=calls)
        if taped:  # the way back: cotangents of the reply down, of the message up
            traffic.count(clients, down=reply_header + reply, up=reply_header + request, trips=calls)
