"""The server's half of a federation: map, sum, mean, scatter, gather, tape and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import client_functions, sent_example, sent_positive
from fedtailor.core.client import Call
from fedtailor.core.environment import Environment
from fedtailor.core.me import Setting
from fedtailor.core.placed import Placed, in_order, outline, row
from fedtailor.core.plausible import Limits, implausible
from fedtailor.core.ranks import ALONE, Ranks
from fedtailor.core.states import changed
from fedtailor.core.tape import Tape
from fedtailor.core.trees import (
    Params,
    Tree,
    detach,
    is_ragged,
    items,
    leaves,
    schema,
    schema_difference,
    tree_map,
)
from fedtailor.errors import ClientError, RoundAbandoned
from fedtailor.local.training import Solver
from fedtailor.privacy import sealed
from fedtailor.privacy.sealed import Privacy


class Engine(Protocol):
    """Where the clients are. Replies and cotangents are stacked per group of clients."""

    setting: Setting

    def start(self) -> None: ...
    def begin_round(self, round: int) -> dict[int, str]: ...  # who is away, and why
    def end_round(self, clients: Sequence[int]) -> dict[int, str]: ...  # whose new state is lost, and why
    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Any]: ...
    def exchange(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]: ...
    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]: ...
    def finish_backward(self) -> None: ...
    def undo(self, clients: Sequence[int] | None = None) -> None: ...
    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[tuple[tuple[int, ...], dict[str, dict[str, Tensor]], Params]]: ...  # sites keep models as `keep`
    def together(self, clients: Sequence[int]) -> Tree | None: ...
    def keep_together(self, clients: Sequence[int], state: Tree, held: Tree) -> None: ...
    def get_states(self) -> Tree: ...
    def set_states(self, rows: Tree) -> None: ...
    def saved(self, states: Sequence[Tree]) -> None: ...  # those that a checkpoint has; sites may forget the others


class AtOnce(NamedTuple):
    """What a round computed on all clients' states at once came to."""

    state: Tree  # private states, stacked
    server: Tree
    largest: Tensor  # norm of the largest reply that a client would have sent
    exchanges: list[tuple[str, tuple[Tree, ...], int, bool]]  # calls it stands for: function, message, times, taped


@dataclass
class Traffic:
    """Bytes and trips of training, summed over clients (bytes) and counted once per call (trips)."""

    up: int = 0
    down: int = 0
    trips: int = 0


@dataclass(frozen=True)
class Fault:
    """A client whose reply was not used, and why."""

    client: str
    round: int
    function: str
    reason: str


@dataclass
class Federation:
    """What an algorithm's `round` is given."""

    engine: Engine
    limits: Limits = field(default_factory=Limits)
    ranks: Ranks = ALONE
    traffic: Traffic = field(default_factory=Traffic)
    faults: list[Fault] = field(default_factory=list)
    round: int = 0
    cohort: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    missed: list[tuple[int, ...]] = field(default_factory=list)  # of each exchange of the round
    looked_at: set[str] = field(default_factory=set)
    reported: dict[str, float | list[float]] = field(default_factory=dict)
    privacy: Privacy = field(default_factory=Privacy)
    noisy_sums: dict[int, int] = field(default_factory=dict)  # by round
    secure_sums: int = 0  # of the round
    _calls: int = 0
    _tape: Tape | None = None
    _errors: list[Exception] = field(default_factory=list)
    _reply_sizes: dict[str, int] = field(default_factory=dict)

    def map(self, fn: Callable[..., Any], *message: Tree | Placed) -> Placed:
        """Every client of the cohort runs `fn(me, *message)` and keeps its new private state; the replies come back."""
        call = self._next(fn, message, taped=self._tape is not None)
        return self._call(call) if self._tape is None else self._tape.call(self, call)

    def aside(self, fn: Callable[..., Any], *message: Tree | Placed) -> Placed:
        """As `map`, for a function that only looks at the private state: a running tape does not record it."""
        return self._call(self._next(fn, tuple(detach(m) for m in message), taped=False))

    def _next(self, fn: Callable[..., Any], message: tuple[Tree | Placed, ...], *, taped: bool) -> Call:
        if client_functions(self.engine.setting.algorithm).get(fn.__name__) is not getattr(fn, "__func__", None):
            raise TypeError(f"fed.map: {fn.__name__} is not a method of this algorithm marked with @on_client")
        args = tuple(m.here(self.cohort, self.ranks) if isinstance(m, Placed) else m for m in message)
        placed = tuple(isinstance(m, Placed) for m in message)
        setting = self.engine.setting
        if taped and is_ragged((args, sent_example(setting.algorithm, fn.__name__, setting.model))):
            raise TypeError(f"fed.map: {fn.__name__} has a ragged message or reply; those cannot be taped")
        self._calls += 1
        self.traffic.trips += 1
        largest = self.limits.max_norm if self.privacy.secure_sum else None
        return Call(fn.__name__, self.round, self._calls - 1, args, placed, taped, largest)

    def report(self, **values: Tensor | list[Tensor]) -> None:
        """Numbers of this round for people: they are recorded with it and shown, nothing is computed from them."""
        for name, value in values.items():
            self.reported[name] = [float(v) for v in value] if isinstance(value, list) else float(value)

    def sum(self, x: Placed) -> Tree:
        """The sum over the cohort; all that the server needs to see of it."""
        if self.privacy.is_sealed:
            return sealed.total(self, x)
        return self.ranks.total(tree_map(lambda v: v.sum(0), x.here(x.clients, self.ranks)))

    def mean(self, x: Placed, weight: Placed | None = None, stale: Tree = None) -> Tree:
        """The mean over the cohort, weighted by one number per client.

        `stale` counts for those who were asked and did not answer, by their samples, if the environment has it so.
        """
        if stale is not None and self.engine.setting.environment.missing == "stale":
            mean = self.mean(x, weight)
            missing = tuple(c for c in self.asked if c not in set(self.cohort))
            if not missing:
                return mean
            absent, present = self.samples(missing), self.samples([c for c in x.clients if c not in set(missing)])
            there = present.sum() / (present.sum() + absent.sum())
            return tree_map(lambda old, new: torch.lerp(old, new, there.to(new.dtype)), stale, mean)
        if self.privacy.is_sealed:
            return sealed.mean(self, x, weight)
        if weight is None:
            return tree_map(lambda v: v / len(x.clients), self.sum(x))
        known = set(weight.clients)
        both = tuple(c for c in x.clients if c in known)  # a client may be lost between two calls
        w = weight.here(both, self.ranks)
        w = w / self.ranks.spread(self.ranks.total(w.sum()))
        parts = tree_map(lambda v: torch.tensordot(w.to(v.dtype), v, dims=1), x.here(both, self.ranks))
        return self.ranks.total(parts)

    def samples(self, clients: Sequence[int]) -> Tensor:
        """Training samples of clients, as they told when they came."""
        return torch.tensor(self.engine.setting.data.train.bounds(clients)[1], dtype=torch.float64)

    @property
    def clients(self) -> int:
        """How many clients there are in all."""
        return len(self.engine.setting.data.clients)

    @property
    def environment(self) -> Environment:
        """What makes clients unequal."""
        return self.engine.setting.environment

    @property
    def solver(self) -> Solver:
        """How clients take local steps."""
        return self.engine.setting.solver

    @contextmanager
    def exchange(self, number: int, *, ask_all: bool = False) -> Iterator[tuple[int, ...]]:
        """One of several exchanges of a round, with those whose replies arrive in it.

        With `ask_all` the others reply too, as a tape needs it, and it is up to the algorithm not to use that.
        """
        everybody, here = self.cohort, self._arriving(number, self.cohort)
        if ask_all:
            yield here
            return
        self.cohort = here
        try:
            yield here
        finally:
            lost = set(here) - set(self.cohort)
            self.cohort = tuple(c for c in everybody if c not in lost)

    def _arriving(self, exchange: int, clients: tuple[int, ...]) -> tuple[int, ...]:
        setting = self.engine.setting
        if not setting.environment.fails:
            return clients
        samples = setting.data.train.bounds(clients)[1]
        found = setting.environment.answers(self.round, exchange, clients, samples)
        self.missed.append(tuple(c for c in clients if c not in set(found)))
        return found

    def scatter(self, rows: Tree) -> Placed:
        """A different message for each client: `rows` has a leading dimension, in the order of `cohort`."""
        for path, leaf in items(rows):
            if leaf.shape[:1] != (len(self.cohort),):
                raise ValueError(
                    f'scatter: "{path}" has {list(leaf.shape)}, not a row for each of {len(self.cohort)} clients'
                )
        return Placed(self.cohort, rows)

    def gather(self, x: Placed, what: str) -> Tree:
        """Look at single replies. `what` names them, for the report of what the server saw."""
        sealed.refuse_look(self, what)
        self.looked_at.add(what)
        return x.tree

    def tape(self, watched: Tree = None) -> Tree:
        """Record from here on. Returns `watched`, a tree of the server's, as the tensors to differentiate by."""
        sealed.refuse_tape(self)
        self._tape = Tape(tree_map(lambda v: v.detach().requires_grad_(), watched))
        return self._tape.watched

    def backward(self, loss: Tensor) -> Tree:
        """Send cotangents back along the tape. Then every client has `me.grad`; returns the gradient by `watched`."""
        if self._tape is None:
            raise RuntimeError("fed.backward without fed.tape")
        tape, self._tape = self._tape, None
        gradient = tape.backward(loss)
        self.engine.finish_backward()
        return gradient

    def at_once(self, compute: Callable[[Tree, Tree], AtOnce | None], server: Tree) -> Tree | None:
        """Where the cohort's states lie stacked in this process: a round as one computation on all of them.

        It must give what the calls give, and counts as much traffic. None where clients are on their own or a number
        is out of bounds: then make the calls, which find out whose it is.
        """
        held = None if self.privacy.calls_only else self.engine.together(self.cohort)
        if (
            held is None
            or len(self.cohort) < max(1, self.limits.min_replies)
            or (made := compute(held, server)) is None
        ):
            return None
        new = [*(v for v in changed(made.state, held) if v is not None), *leaves(made.server)]
        sums = torch.stack([made.largest.double(), *(v.sum().double() for v in new)])  # of what is not finite is not
        if not (made.largest <= self.limits.max_norm and bool(torch.isfinite(sums).all())):
            return None
        self.engine.keep_together(self.cohort, made.state, held)
        n = len(self.cohort)
        for function, message, times, taped in made.exchanges:
            request, reply = codec.tree_size(message), self._reply_size(function)
            for digits, calls in Counter(len(str(self._calls + i)) for i in range(times)).items():
                # the length of a header depends on its numbers by their digits only
                call = Call(function, self.round, 10 ** (digits - 1), message, (False,) * len(message), taped)
                there, back = codec.header_size(call.header), codec.header_size(call.reply_header)
                self._count(n, down=there + request, up=back + reply, trips=calls)
                if taped:  # the way back: cotangents of the reply down, of the message up
                    self._count(n, down=back + reply, up=back + request, trips=calls)
            self._calls += times
        return made.server

    def run_round(self, round: int, cohort: Sequence[int], server: Tree) -> Tree:
        """One round of the algorithm; when it is abandoned everything is as before and `RoundAbandoned` is raised."""
        self.round, self.cohort, self.asked, self.missed = round, tuple(cohort), tuple(cohort), []
        if round > 0:  # a preparing round has several exchanges, each with failures of its own
            self.cohort = self._arriving(0, self.cohort)
            if not self.cohort:
                return server  # nobody answered: everything is as before
        missed, is_first = self.missed, True
        while True:
            self._calls, self._tape, self._errors, self.reported, self.missed = 0, None, [], {}, list(missed)
            self.secure_sums = 0
            self._leave_out(self.engine.begin_round(round), "begin")
            try:
                with torch.enable_grad():  # a tape must record whatever the caller's mode
                    made = detach(self.engine.setting.algorithm.round(self, server))
                    made = self.ranks.from_first(made)  # machines of different kinds must not drift apart
                lost = self.engine.end_round(self.cohort)
            except BaseException:
                self.engine.undo()
                raise
            if not lost:
                return made
            self.engine.undo()  # their replies are in what was made, their new states are nowhere: again without them
            if self.secure_sums:  # a second sum, of the same replies but theirs, would show theirs
                self.faults += [Fault(self._name(c), round, "end", why) for c, why in lost.items()]
                names = ", ".join(map(self._name, lost))
                raise RoundAbandoned(f"round {round}: lost after their replies were summed: {names}")
            if not is_first or len(self.cohort) - len(lost) >= max(1, self.limits.min_replies):
                self._leave_out(lost, "end")
            is_first = False  # too few would be left: once more with all, for they may just have gone

    def _leave_out(self, clients: dict[int, str], when: str) -> None:
        """Go on without clients that are away, if enough are left."""
        self.faults += [Fault(self._name(c), self.round, when, clients[c]) for c in self.cohort if c in clients]
        self.cohort = tuple(c for c in self.cohort if c not in clients)
        if clients and len(self.cohort) < max(1, self.limits.min_replies):
            raise RoundAbandoned(f"round {self.round}: {len(self.cohort)} of {len(self.asked)} clients are there")

    def _call(self, call: Call) -> Placed:
        """Send a call, check every reply, keep the good ones in the order of the cohort."""
        setting = self.engine.setting
        example: Tree = None  # a sealed reply stays where it is
        positive: list[str] = []
        if call.sealed is None:
            example = sent_example(setting.algorithm, call.function, setting.model)
            positive = sent_positive(setting.algorithm, call.function)
        wanted = schema(example)
        asked = self.cohort
        parts: list[tuple[tuple[int, ...], Tree]] = []
        rejected: list[tuple[int, str]] = []
        errors: dict[int, Exception] = {}
        down, up = _size_down(call, len(self.ranks.mine(asked))), 0
        for reply in self.engine.call(call, asked):
            if reply.error is not None:
                errors[reply.clients[0]] = reply.error
                rejected.append((reply.clients[0], str(reply.error)))
                continue
            up += codec.total_size(call.reply_header, reply.tree, len(reply.clients))
            wrong = schema_difference(schema(reply.tree, stacked=True), wanted)
            reasons = [wrong and f"reply {wrong}"] * len(reply.clients)
            if not wrong:
                reasons = implausible(reply.tree, len(reply.clients), positive, self.limits.max_norm, reply.norms)
            rejected += [(c, reason) for c, reason in zip(reply.clients, reasons, strict=True) if reason]
            good = [i for i, reason in enumerate(reasons) if not reason]
            if good:
                tree = reply.tree if len(good) == len(reasons) else tree_map(lambda v, g=good: v[g], reply.tree)
                parts.append((tuple(reply.clients[i] for i in good), tree))
        self._settle(call, down, up, rejected, errors)
        if len(self.cohort) < max(1, self.limits.min_replies) or (call.taped and self.cohort != asked):
            if self._errors and len(self._errors) == len(asked):
                raise ClientError(f"every client failed; the first: {self._errors[0]}") from self._errors[0]
            raise RoundAbandoned(
                f"round {self.round}: {len(self.cohort)} of {len(asked)} clients gave a usable reply to "
                f"{call.function}; "
                + ("a taped round needs all" if call.taped else f"{self.limits.min_replies} needed")
                + f"; {self.faults[-1].client}: {self.faults[-1].reason}"
            )
        rows = in_order(parts, self.ranks.mine(self.cohort), example)
        return Placed(self.cohort, sealed.seal(self, call, rows) if self.privacy.is_sealed else rows, self.ranks)

    def _settle(
        self, call: Call, down: int, up: int, rejected: list[tuple[int, str]], errors: dict[int, Exception]
    ) -> None:
        """Count the bytes of a call and leave out the clients rejected in it, on whichever rank they are."""
        told = self.ranks.told([down, up, rejected, list(errors)])
        self.traffic.down += sum(t[0] for t in told)
        self.traffic.up += sum(t[1] for t in told)
        raised = {c for t in told for c in t[3]}
        if self.ranks.count > 1:
            position = {c: i for i, c in enumerate(self.cohort)}
            rejected = sorted((pair for t in told for pair in t[2]), key=lambda pair: position[pair[0]])
        for client, reason in rejected:
            self.cohort = tuple(c for c in self.cohort if c != client)
            self.engine.undo([client])
            self.faults.append(Fault(self.engine.setting.data.clients[client], call.round, call.function, reason))
            if client in raised:
                self._errors.append(errors.get(client) or ClientError(reason))

    def _reply_size(self, function: str) -> int:
        """Length of a reply without its header."""
        if function not in self._reply_sizes:
            setting = self.engine.setting
            self._reply_sizes[function] = codec.tree_size(sent_example(setting.algorithm, function, setting.model))
        return self._reply_sizes[function]

    def _count(self, clients: int, down: int, up: int, trips: int = 1) -> None:
        self.traffic.trips += trips
        self.traffic.down += trips * clients * down
        self.traffic.up += trips * clients * up

    def _name(self, client: int) -> str:
        return self.engine.setting.data.clients[client]


def _size_down(call: Call, clients: int) -> int:
    """Bytes of a call to `clients`; only ragged messages differ in length."""
    if is_ragged(call.args):
        return sum(codec.size(call.header, row(call.args, call.placed, i)) for i in range(clients))
    return clients * codec.size(call.header, outline(call.args, call.placed))
