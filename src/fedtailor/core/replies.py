"""The replies to one call. They come one after the other; a sum adds them up as they come and lets go of them.

So a mean over many clients holds one running sum, not all of their models. Replies are kept where an algorithm looks at
them again: those that were not summed first, small tensors, and all of a call that is small as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedtailor.core import calling, codec
from fedtailor.core.client import Call
from fedtailor.core.per_client import Path, PerClient, at_path, in_order
from fedtailor.core.trees import Tree, leaves, rebuild

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation

LARGE = 2**12  # numbers of a client from which on a tensor is added as it comes; smaller ones are summed at once
KEPT = 2**26  # bytes: replies to a call that are fewer together are kept in any case

Flat = list[Tensor | None]  # the leaves of a stacked reply; None for what was summed and is gone


class ReplyStream:
    """Asked for once: when somebody needs them first, or the next call is made, or the round ends."""

    def __init__(self, fed: Federation, call: Call, example: Tree) -> None:
        self.fed, self.call, self.example = fed, call, example
        self.is_done = False
        self.examples = leaves(example)
        self._numbered = rebuild(example, iter(range(len(self.examples))))
        self._message = [(v, v._version) for v in leaves(call.args)]
        self._keeps_all = codec.tree_size(example) * len(fed.present) <= KEPT
        self._groups: list[tuple[tuple[int, ...], Flat]] = []  # in the order in which they came
        self._clients: tuple[int, ...] = ()

    @property
    def clients(self) -> tuple[int, ...]:
        """Who gave a usable reply."""
        self.finish()
        return self._clients

    def keep(self) -> None:
        """Do not let go of what is summed first."""
        self._keeps_all = True

    def finish(self) -> None:
        """Let all replies come and be kept, if they have not come yet."""
        if not self.is_done:
            self._run(None)

    def rows(self, path: Path) -> Tree:
        """One part of the replies, in the order of `clients`; of those on this rank."""
        self.finish()
        columns = self.columns(self.indices(path), self.fed.group.mine(self._clients))
        return rebuild(at_path(self.example, path), iter(columns))

    def indices(self, path: Path) -> list[int]:
        """Which leaves are under a path."""
        return [int(i) for i in leaves(at_path(self._numbered, path))]

    def columns(self, indices: Sequence[int], clients: tuple[int, ...]) -> list[Tensor]:
        """Some leaves, stacked in the order of `clients`."""
        parts = [(group, [flat[i] for i in indices]) for group, flat in self._groups]
        if any(leaf is None for _, part in parts for leaf in part):
            raise RuntimeError(
                f"the replies to {self.call.function} were summed as they came and are gone; "
                "call fed.keep(replies) before the first sum to use them again"
            )
        stacked: list[Tensor] = in_order(parts, clients, [self.examples[i] for i in indices])
        return stacked

    def weighted_sum(self, path: Path, weight: PerClient | None) -> tuple[Tree, Tensor | None]:
        """The sum of one part over the clients of this rank, and of the weights."""
        sums = _Sums(self, path, weight)
        if self.is_done:
            for clients, flat in self._groups:
                sums.add(clients, flat)
        else:
            self._run(sums)
        totals, weights = sums.result()
        return rebuild(at_path(self.example, path), iter(totals)), weights

    def large(self, indices: Sequence[int]) -> list[int]:
        """Those of some leaves that are added as they come."""
        each = ((i, self.examples[i]) for i in indices)
        return [i for i, v in each if v.numel() >= LARGE and v.is_floating_point()]

    def _run(self, sums: _Sums | None) -> None:
        if any(v._version != before for v, before in self._message):
            raise RuntimeError(f"fed.map({self.call.function}): the message was changed in place before replies came")
        self.fed.forget_pending()
        for clients, tree in calling.usable_replies(self.fed, self.call):
            flat: Flat = list(leaves(tree))
            del tree
            if sums is not None:
                sums.add(clients, flat)
                if not self._keeps_all:  # what stays must not hold the memory of what goes
                    flat = [None if i in sums.added or v is None else v.clone() for i, v in enumerate(flat)]
            self._groups.append((clients, flat))
        self._clients, self.is_done = self.fed.present, True


class _Sums:
    """The weighted sum of one part of the replies: large tensors as they come, small ones at the end."""

    def __init__(self, stream: ReplyStream, path: Path, weight: PerClient | None) -> None:
        self._stream, self._weight = stream, weight
        self._indices = stream.indices(path)
        self.added = stream.large(self._indices)
        self._sums: list[Tensor] = []
        self._weight_at: int | None = None  # its leaf, if it comes with the replies
        self._known: dict[int, float] = {}  # by client, if it was there before
        if weight is not None and weight.stream is stream:
            (self._weight_at,) = stream.indices(weight.path)
        elif weight is not None:
            self._known = dict(zip(weight.clients, weight.everywhere().tolist(), strict=True))

    def add(self, clients: tuple[int, ...], flat: Flat) -> None:
        """Some more clients."""
        if not self.added:
            return
        each = [v for i in self.added if (v := flat[i]) is not None]
        weights = self._weights(clients, flat)
        if len(clients) == 1:
            rows, alpha = [v[0] for v in each], weights[0]
        else:
            rows, alpha = [torch.tensordot(v.new_tensor(weights), v, dims=1) for v in each], 1.0
        if self._sums:
            torch._foreach_add_(self._sums, rows, alpha=alpha)
        else:
            self._sums = list(torch._foreach_mul(rows, alpha))

    def _weights(self, clients: tuple[int, ...], flat: Flat) -> list[float]:
        if self._weight is None:
            return [1.0] * len(clients)
        if self._weight_at is None:  # a client may have been lost between two calls
            return [self._known.get(c, 0.0) for c in clients]
        weight = flat[self._weight_at]
        assert weight is not None
        return weight.tolist()

    def result(self) -> tuple[list[Tensor], Tensor | None]:
        """The sum of each leaf, and of the weights."""
        stream, group = self._stream, self._stream.fed.group
        clients, w = stream.clients, None
        if self._weight is not None:
            counted = set(clients) if self._weight_at is not None else set(self._known)
            clients = tuple(c for c in clients if c in counted)
            w = self._weight.rows(group, clients)
        small = [i for i in self._indices if i not in set(self.added)]
        totals: dict[int, Tensor] = dict(zip(self.added, self._sums, strict=False))
        for i, rows in zip(small, stream.columns(small, group.mine(clients)), strict=True):
            totals[i] = rows.sum(0) if w is None else torch.tensordot(w.to(rows.dtype), rows, dims=1)
        for i in self.added if not self._sums else ():  # no client is on this rank
            totals[i] = torch.zeros_like(stream.examples[i])
        return [totals[i] for i in self._indices], None if w is None else w.sum()
