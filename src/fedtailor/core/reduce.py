"""How the replies to a call become one sum: values of single clients, replies as they arrive, and the slots between.

A slot is a place of an experiment's `Aggregation` where one thing may happen to replies:

| where | slot | what may be there |
|---|---|---|
| client | `at_client` | `Clip`, `LocalNoise`, in this order |
| between | `reduction` | one of `Open`, `Secure`, `Robust` |
| server | `noise` | noise on every sum |
| server | `server_step` | a step from the model that was sent towards the mean of those that came back |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.process_group import SINGLE_PROCESS, ProcessGroup
from fedtailor.core.trees import Params, Schema, Tree, items, leaves, rebuild, schema, schema_difference, tree_map, wide
from fedtailor.errors import ClientUnreachable, ConfigError

LARGE = 2**12  # numbers of a client from which on a tensor is added as it comes; smaller ones are summed at once
KEPT = 2**26  # bytes: replies to a call that are fewer together are kept in any case
INSTEAD = "choose one that only sums replies, such as fedavg, fedrep or ditto"

Path = tuple[str | int, ...]
Flat = list[Tensor | None]  # the leaves of a stacked reply; None for what was summed and is gone


@dataclass(frozen=True)
class Call:
    """One call to the cohort: which function, when, and the message."""

    function: str
    round: int
    number: int  # of the call within its round
    args: tuple[Tree, ...]
    placed: tuple[bool, ...]  # per argument: one row per client, or the same for all
    taped: bool = False
    is_sealed: bool = False  # the reply stays at the client, to be summed there

    def key(self, seed: int) -> tuple[str | int, ...]:
        """Begins the name of every random stream that the call uses."""
        return seed, self.round, self.number

    @property
    def header(self) -> dict[str, Any]:
        """What a request says beside its message."""
        return {
            "function": self.function,
            "round": self.round,
            "call": self.number,
            "placed": list(self.placed),
            "taped": self.taped,
        }

    @property
    def reply_header(self) -> dict[str, Any]:
        """What a reply, or a cotangent that travels back, says beside its tensors."""
        return {"round": self.round, "call": self.number}


@dataclass(frozen=True)
class Reply:
    """What came back from some clients: a stacked reply, or the error of a single one."""

    clients: tuple[int, ...]
    tree: Tree = None
    error: Exception | None = None
    norms: list[float] | None = None  # of each client's reply, where they are known


# slots


class ClientStep(Protocol):
    """What happens to a reply before it leaves its client."""

    def apply(self, reply: Tree, args: tuple[Tree, ...], placed: tuple[bool, ...]) -> Tree:
        """The reply to a message as it may leave."""


class Reduction(Protocol):
    """How the replies of a cohort become one sum. `fed` is the `Federation`, which is built on this module."""

    @property
    def hides(self) -> str:
        """The configuration key because of which the server sees no single reply; "" where it may."""

    @property
    def is_sealed(self) -> bool:
        """Whether replies stay at their clients, and leave them as terms of sums only."""

    def sum(self, fed: Any, x: PerClient, weight: PerClient | None) -> tuple[Tree, Tensor]:
        """The (weighted) sum over the cohort, and the sum of the weights or the number of clients."""

    def refuse_tape(self, title: str) -> None:
        """Raise a `ConfigError` if rounds of the method of this title cannot be differentiated."""

    def check(self, experiment: Any) -> None:
        """Raise a `ConfigError` if it does not suit the experiment."""


class SumNoise(Protocol):
    def add(self, fed: Any, x: PerClient, total: Tree) -> Tree:
        """The sum of `x` with noise."""

    def check(self, experiment: Any) -> None:
        """Raise a `ConfigError` if it does not suit the experiment."""


class ServerStep(Protocol):
    """How a server goes from the model it sent out towards the mean of those that came back."""

    def step(self, sent: Params, mean: Params, memory: Tree) -> tuple[Params, Tree]:
        """The next model and what to remember; `memory` is None at first."""


@dataclass(frozen=True)
class Open:
    """The server may look at every reply, and the record says at which it did."""

    hides = ""
    is_sealed = False

    def sum(self, fed: Any, x: PerClient, weight: PerClient | None) -> tuple[Tree, Tensor]:
        """Replies are added as they arrive."""
        if x.stream is not None:
            total, by = x.stream.weighted_sum(x.path, weight)
        elif weight is None:
            total, by = tree_map(lambda v: v.sum(0), x.rows(fed.group)), None
        else:
            both = tuple(c for c in x.clients if c in set(weight.clients))  # a client may be lost between two calls
            w = weight.rows(fed.group, both)
            total, by = tree_map(lambda v: torch.tensordot(w.to(v.dtype), v, dims=1), x.rows(fed.group, both)), w.sum()
        count = fed.model.like.new_tensor(len(x.clients), dtype=torch.int64) if by is None else fed.group.total(by)
        return fed.group.total(total), count

    def refuse_tape(self, title: str) -> None:
        """A sum is linear, so it can be differentiated."""

    def check(self, experiment: Any) -> None:
        """It suits every experiment."""


@dataclass(frozen=True)
class Aggregation:
    """What happens to replies, slot by slot."""

    at_client: tuple[ClientStep, ...] = ()
    reduction: Reduction = field(default_factory=Open)
    noise: SumNoise | None = None
    server_step: ServerStep | None = None

    def __post_init__(self) -> None:
        if self.noise is not None and not isinstance(self.reduction, Open) and not self.reduction.is_sealed:
            raise ConfigError("aggregation.mean: looks at single replies, which privacy.noise hides")

    @property
    def hides(self) -> str:
        """The configuration key because of which the server sees no single reply; "" where it may."""
        return self.reduction.hides or ("privacy.noise" if self.noise is not None else "")

    @property
    def is_plain(self) -> bool:
        """Whether nothing happens to replies but that they are added up: then a round may be one computation."""
        return not self.at_client and self.noise is None and isinstance(self.reduction, Open)

    def check(self, experiment: Any) -> None:
        self.reduction.check(experiment)
        if self.noise is not None:
            self.noise.check(experiment)

    def refuse_look(self, title: str, what: str) -> None:
        """Raise a `ConfigError` if single replies may not be looked at."""
        if self.hides:
            raise ConfigError(f'{self.hides}: {title} looks at single replies ("{what}"); {INSTEAD}')

    def refuse_tape(self, title: str) -> None:
        """Raise a `ConfigError` if rounds may not be differentiated: a tape sends single replies and cotangents."""
        self.reduction.refuse_tape(title)
        if self.hides:
            raise ConfigError(f"{self.hides}: {title} differentiates through its rounds (a tape); {INSTEAD}")


# values of single clients


class PerClient:
    """A value that each client of a cohort has its own version of. Single ones are seen through `fed.gather` alone.

    Replies to a call may still be on their way; they come when somebody asks for them.
    """

    def __init__(
        self,
        clients: tuple[int, ...],
        rows: Tree,
        group: ProcessGroup = SINGLE_PROCESS,
        call: Call | None = None,
        example: Tree = None,
    ) -> None:
        """Rows with a leading client dimension: of all `clients` or, with a group, of those on this rank.

        Replies to a call have it, and a whole reply as it is declared; sealed ones have no rows.
        """
        self._clients, self._rows, self._group = clients, rows, group
        self.call, self.example = call, example
        self.path: Path = ()  # which part of its replies this is
        self.stream: ReplyStream | None = None

    @classmethod
    def of_stream(cls, stream: ReplyStream, path: Path = ()) -> PerClient:
        """A part of replies that have not come yet."""
        part = cls((), None, stream.group, stream.call, stream.example)
        part.stream, part.path = stream, path
        return part

    @property
    def clients(self) -> tuple[int, ...]:
        """Who has a version."""
        return self._clients if self.stream is None else self.stream.clients

    def __iter__(self) -> Iterator[PerClient]:
        """The parts of a reply that is a tuple."""
        return (self[i] for i in range(len(self._rows if self.call is None else at_path(self.example, self.path))))

    def __getitem__(self, key: str | int) -> PerClient:
        if self.stream is not None:
            return PerClient.of_stream(self.stream, (*self.path, key))
        rows = None if self._rows is None else self._rows[key]
        part = PerClient(self._clients, rows, self._group, self.call, self.example)
        part.path = (*self.path, key)
        return part

    def rows(self, group: ProcessGroup, clients: tuple[int, ...] | None = None) -> Tree:
        """For reductions: the rows of all or some clients; of those on this rank."""
        own = self._own()
        wanted = self.clients if clients is None else clients
        if self._group is not group:  # made from what the server knows, so all rows are there
            return group.own(_some(own, self.clients, wanted), wanted)
        return _some(own, group.mine(self.clients), group.mine(wanted))

    def everywhere(self, clients: Sequence[int] | None = None) -> Tree:
        """For reductions: the rows of all or some clients, on every rank."""
        rows = self._group.everywhere(self._own(), self.clients)
        return _some(rows, self.clients, self.clients if clients is None else tuple(clients))

    def _own(self) -> Tree:
        return self._rows if self.stream is None else self.stream.rows(self.path)


def at_path(tree: Tree, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def _some(rows: Tree, clients: tuple[int, ...], wanted: tuple[int, ...]) -> Tree:
    if wanted == clients:
        return rows
    position = {c: i for i, c in enumerate(clients)}
    at = [position[c] for c in wanted]
    return tree_map(lambda v: v[at], rows)


def row(args: tuple[Tree, ...], placed: tuple[bool, ...], at: int) -> tuple[Tree, ...]:
    """The message as one client receives it."""
    return tuple(tree_map(lambda v: v[at], a) if own else a for a, own in zip(args, placed, strict=True))


def outline(args: tuple[Tree, ...], placed: tuple[bool, ...]) -> tuple[Tree, ...]:
    """The shapes and types of the message as a client receives it, even if there is none here."""

    def one(v: Tensor) -> Tensor:
        return v.new_empty(()).expand(v.shape[1:])

    return tuple(tree_map(one, a) if own else a for a, own in zip(args, placed, strict=True))


def in_order(parts: list[tuple[tuple[int, ...], Tree]], clients: tuple[int, ...], example: Tree = None) -> Tree:
    """Rows of several groups as one stack, in the order of `clients`; rows of others are left out.

    `example`, a row, gives the shapes where there is no group.
    """
    if not parts:
        return tree_map(lambda v: v.new_empty((0, *v.shape)), example)
    have = [c for group, _ in parts for c in group]
    tree = parts[0][1] if len(parts) == 1 else tree_map(lambda *v: torch.cat(v), *(tree for _, tree in parts))
    if tuple(have) == clients:
        return tree
    position = {c: i for i, c in enumerate(have)}
    at = [position[c] for c in clients]
    return tree_map(lambda v: v[at], tree)


# replies as they arrive


class ReplyStream:
    """The replies to one call, which come one after the other; a sum adds them as they come and lets go of them.

    So a mean over many clients holds one running sum, not all of their models. Replies are kept where an algorithm
    looks at them again: those that were not summed first, small tensors, and all of a call that is small as a whole.
    They arrive once: when somebody needs them first, or the next call is made, or the round ends.
    """

    def __init__(
        self,
        call: Call,
        example: Tree,
        group: ProcessGroup,
        arriving: Iterator[tuple[tuple[int, ...], Tree]],
        present: Callable[[], tuple[int, ...]],
    ) -> None:
        """`arriving` brings the usable replies of groups of clients; `present` says who is left after them."""
        self.call, self.example, self.group = call, example, group
        self.examples = leaves(example)
        self.is_done = False
        self._arriving, self._present = arriving, present
        self._numbered = rebuild(example, iter(range(len(self.examples))))
        self._message = [(v, v._version) for v in leaves(call.args)]
        self._keeps_all = codec.tree_size(example) * len(present()) <= KEPT
        self._groups: list[tuple[tuple[int, ...], Flat]] = []  # in the order in which they came
        self._clients: tuple[int, ...] = ()

    @property
    def clients(self) -> tuple[int, ...]:
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
        columns = self.columns(self.indices(path), self.group.mine(self._clients))
        return rebuild(at_path(self.example, path), iter(columns))

    def indices(self, path: Path) -> list[int]:
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
        sums = _RunningSums(self, path, weight)
        if self.is_done:
            for clients, flat in self._groups:
                sums.add(clients, flat)
        else:
            self._run(sums)
        totals, weights = sums.result()
        return rebuild(at_path(self.example, path), iter(totals)), weights

    def _run(self, sums: _RunningSums | None) -> None:
        if any(v._version != before for v, before in self._message):
            raise RuntimeError(f"fed.map({self.call.function}): the message was changed in place before replies came")
        for clients, tree in self._arriving:
            flat: Flat = list(leaves(tree))
            del tree
            if sums is not None:
                sums.add(clients, flat)
                if not self._keeps_all:  # what stays must not hold the memory of what goes
                    flat = [None if i in sums.added or v is None else v.clone() for i, v in enumerate(flat)]
            self._groups.append((clients, flat))
        self._clients, self.is_done = self._present(), True


class _RunningSums:
    """The weighted sum of one part of the replies: large tensors as they come, small ones at the end."""

    def __init__(self, stream: ReplyStream, path: Path, weight: PerClient | None) -> None:
        self._stream, self._weight = stream, weight
        self._indices = stream.indices(path)
        large = ((i, stream.examples[i]) for i in self._indices)
        self.added = [i for i, v in large if v.numel() >= LARGE and v.is_floating_point()]
        self._sums: list[Tensor] = []
        self._weight_at: int | None = None  # its leaf, if it comes with the replies
        self._known: dict[int, float] = {}  # by client, if it was there before
        if weight is not None and weight.stream is stream:
            (self._weight_at,) = stream.indices(weight.path)
        elif weight is not None:
            self._known = dict(zip(weight.clients, weight.everywhere().tolist(), strict=True))

    def add(self, clients: tuple[int, ...], flat: Flat) -> None:
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
        stream, group = self._stream, self._stream.group
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


# which replies are believed


@dataclass(frozen=True)
class Limits:
    """Fewer usable replies, or larger ones, are not used."""

    min_replies: int = 1
    max_norm: float = 1e8

    @property
    def least(self) -> int:
        """Replies without which there is no round."""
        return max(1, self.min_replies)


class Rejected(NamedTuple):
    client: int
    reason: str
    is_mistake: bool  # in the method: its function raised, or what it sent is not what it declares


def validate(
    reply: Reply, wanted: Schema, positive: list[str], max_norm: float
) -> tuple[tuple[int, ...], Tree, list[Rejected]]:
    """Whose replies can be used, these replies, and the others."""
    if reply.error is not None:
        is_mistake = not isinstance(reply.error, ClientUnreachable)
        return (), None, [Rejected(reply.clients[0], str(reply.error), is_mistake)]
    if wrong := schema_difference(schema(reply.tree, stacked=True), wanted):
        return (), None, [Rejected(c, f"reply {wrong}", True) for c in reply.clients]
    reasons = reply_faults(reply.tree, len(reply.clients), positive, max_norm, reply.norms)
    rejected = [Rejected(c, reason, False) for c, reason in zip(reply.clients, reasons, strict=True) if reason]
    if not rejected:
        return reply.clients, reply.tree, []
    good = [i for i, reason in enumerate(reasons) if not reason]
    return tuple(reply.clients[i] for i in good), tree_map(lambda v: v[good], reply.tree), rejected


def reply_faults(
    stack: Tree, clients: int, positive: list[str], max_norm: float, known: list[float] | None = None
) -> list[str | None]:
    """For each client the reason not to believe its reply, or None; the norms of replies may be `known`."""
    flat = {path: _flat(leaf, clients) for path, leaf in items(stack) if leaf.is_floating_point()}
    if known is None:
        norms = [wide(torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())))) for v in flat.values()]
        known, counts = _read(norms, [flat[path] for path in positive], clients)
    else:
        counts = _read([], [flat[path] for path in positive], clients)[1]
    reasons: list[str | None] = [None] * clients
    for i in (i for i, norm in enumerate(known) if not norm <= max_norm):  # it tells of what is not finite, too
        wrong = [path for path, v in flat.items() if not bool(torch.isfinite(v[i]).all())]
        large = torch.stack([wide(v[i]).square().sum() for v in flat.values()]).sum().sqrt().item()
        if wrong:
            reasons[i] = f'reply "{wrong[0] or "number"}" is not finite'
        elif large > max_norm:
            reasons[i] = f"reply has norm {large:.3g}, above the limit {max_norm:.3g}"
    for i, least in enumerate(counts):
        if not least > 0:
            reasons[i] = reasons[i] or f"count {least:g} is not positive"
    return reasons


def _read(norms: list[Tensor], counts: list[Tensor], clients: int) -> tuple[list[float], list[float]]:
    """The norm of each client's reply and the least of its counts, in one read off the device."""
    rows = [torch.stack(norms).square().sum(0).sqrt()] if norms else []
    rows += [torch.cat(counts, 1).amin(1).to(rows[0].dtype if rows else counts[0].dtype)] if counts else []
    if not rows:
        return [0.0] * clients, []
    each = torch.stack(rows).tolist()
    return each[0] if norms else [0.0] * clients, each[-1] if counts else []


def _flat(leaf: Tensor, clients: int) -> Tensor:
    """A row per client, but for kernels whose channels come last: these would be copied, and a model is large."""
    return leaf.reshape(clients, -1) if leaf.is_contiguous() or leaf.dim() == 1 else leaf
