"""The server's half of a federation: a round from top to bottom, and what an algorithm may do in it.

`run_round` asks the cohort, lets the algorithm make its calls, and keeps the new states, or undoes them and begins
again without clients that were lost. `map` sends a call; `sum` and `mean` add up the replies as they arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import client_functions, is_model, reply_example, reply_positive
from fedtailor.core.context import LocalSolver, View
from fedtailor.core.data import take
from fedtailor.core.engine import Engine, Taping, is_losing, is_stacking
from fedtailor.core.environment import Environment
from fedtailor.core.model import Model
from fedtailor.core.process_group import SINGLE_PROCESS, ProcessGroup
from fedtailor.core.reduce import (
    Call,
    Limits,
    PerClient,
    Rejected,
    ReplyStream,
    at_path,
    in_order,
    outline,
    row,
    validate,
)
from fedtailor.core.tape import Tape
from fedtailor.core.trees import (
    Tree,
    changed_leaves,
    detach,
    is_ragged,
    items,
    leaves,
    schema,
    to_device,
    tree_map,
    wide,
    widest,
)
from fedtailor.errors import ClientError, RoundAbandoned


@dataclass(frozen=True)
class Fault:
    """A client whose reply was not used, and why."""

    client: str
    round: int
    function: str
    reason: str


@dataclass
class Record:
    """What is reported to people: faults and gathered replies of the run, figures of the round."""

    faults: list[Fault] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)
    reported: dict[str, float | list[float]] = field(default_factory=dict)


@dataclass
class Attendance:
    """Who takes part in the round."""

    round: int = 0
    asked: tuple[int, ...] = ()
    present: tuple[int, ...] = ()  # those asked whose replies were all accepted so far
    missed: list[tuple[int, ...]] = field(default_factory=list)  # of each exchange of the round
    is_part: bool = False  # calls go to a part of the cohort, which may be fewer than the least number of replies


@dataclass
class SumLog:
    """What outlasts a sum: how many had noise, whether replies were opened, and the memory of server steps."""

    noisy: dict[int, int] = field(default_factory=dict)  # by round
    before_noise: Callable[[], None] = lambda: None  # called before a noisy sum is seen: what is counted must be stored
    secure: int = 0  # in this round
    moments: dict[str, Tree] = field(default_factory=dict)  # by function and part of its reply
    new_moments: dict[str, Tree] = field(default_factory=dict)  # of this round; they count when it has ended

    def count_noisy(self, round: int) -> int:
        """Count a sum with noise; returns its number in the round, of a round that is repeated the next one."""
        self.noisy[round] = self.noisy.get(round, 0) + 1
        self.before_noise()
        return self.noisy[round]


@dataclass
class Traffic:
    """Bytes and trips of training, as messages would be serialised: bytes summed over clients, trips once per call."""

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


@dataclass
class Federation:
    """What an algorithm's `round` is given: the cohort as one value, and what may be done with it.

    Args:
        engine: Where the clients are.
        limits: Which replies are not believed, and how few are too few.
        group: The processes that run this federation together.
    """

    engine: Engine
    limits: Limits = field(default_factory=Limits)
    group: ProcessGroup = SINGLE_PROCESS
    traffic: Traffic = field(default_factory=Traffic)
    record: Record = field(default_factory=Record)
    sums: SumLog = field(default_factory=SumLog)
    attendance: Attendance = field(default_factory=Attendance)
    _calls: int = 0
    _pending: ReplyStream | None = None
    _tape: Tape | None = None

    # a round

    def run_round(self, round: int, cohort: Sequence[int], server: Tree) -> Tree:
        """One round of the algorithm.

        Args:
            round: Its number, from 1 on; rounds up to 0 prepare the run.
            cohort: Who is asked to take part.
            server: The server's state.

        Returns:
            The server's new state; the engine keeps the clients' new states.

        Raises:
            RoundAbandoned: Too few replies could be used. Everything is as before.
        """
        here = self.attendance = Attendance(round, tuple(cohort), tuple(cohort))
        if round > 0:  # a preparing round has several exchanges, each with failures of its own
            here.present = self._arriving(0, here.present)
            if not here.present:
                return server  # nobody answered: everything is as before
        missed, is_first = here.missed, True
        while True:
            self._begin_attempt()
            here.missed = list(missed)
            self._go_without(self.engine.begin_round(round), "begin")
            new, lost = self._attempt(server)
            if not lost:
                if round > 0:
                    self.sums.moments = self.sums.moments | self.sums.new_moments
                return new
            self.engine.undo()  # their replies are in `new`, their new states are nowhere: again without them
            if self.sums.secure:  # a second sum, of the same replies but theirs, would show theirs
                self.record.faults += [Fault(self.names[c], round, "end", why) for c, why in lost.items()]
                names = ", ".join(self.names[c] for c in lost)
                raise RoundAbandoned(f"round {round}: lost after their replies were summed: {names}")
            if not is_first or len(self.present) - len(lost) >= self.limits.least:
                self._go_without(lost, "end")
            is_first = False  # too few would be left: once more with all, for they may just have gone

    def _begin_attempt(self) -> None:
        """Forget what an attempt at the round has left behind."""
        self._calls, self._tape, self._pending, self.record.reported = 0, None, None, {}
        self.sums.secure, self.sums.new_moments = 0, {}

    def _attempt(self, server: Tree) -> tuple[Tree, Mapping[int, str]]:
        """The algorithm's round to its last reply: the new server state, and whose new private state is lost."""
        versions = [v._version for v in leaves(server)]
        try:
            with torch.enable_grad():  # a tape must record whatever the caller's mode
                new = self.engine.experiment.algorithm.round(self, server)
                self._finish_pending()
                self._cut_moments()
                # machines of different kinds must not drift apart
                new, self.sums.new_moments = self.group.broadcast((detach(new), self.sums.new_moments))
            self._refuse_written(server, versions)
            return new, self.engine.end_round(self.present) if is_losing(self.engine) else {}
        except BaseException as error:
            self.engine.undo()
            if isinstance(error, RoundAbandoned):  # the run goes on, from the state before
                self._refuse_written(server, versions)
            raise

    def _refuse_written(self, server: Tree, versions: list[int]) -> None:
        if versions != [v._version for v in leaves(server)]:
            name = type(self.engine.experiment.algorithm).__name__
            raise TypeError(f"{name}.round changes the state of the server in place; return a new tree")

    def _go_without(self, clients: Mapping[int, str], when: str) -> None:
        """Go on without clients that are away, if enough are left."""
        if not clients:
            return
        here = self.attendance
        self.record.faults += [Fault(self.names[c], here.round, when, clients[c]) for c in here.present if c in clients]
        here.present = tuple(c for c in here.present if c not in clients)
        if len(here.present) < self.limits.least:
            raise RoundAbandoned(
                f"round {here.round}: only {len(here.present)} of {len(here.asked)} clients are available"
            )

    def _arriving(self, exchange: int, clients: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `clients` whose replies arrive in an exchange of the round."""
        if not self.environment.fails:
            return clients
        samples = self.engine.experiment.data.train.bounds(clients)[1]
        arrived = self.environment.answers(self.round, exchange, clients, samples)
        self.attendance.missed.append(tuple(c for c in clients if c not in set(arrived)))
        return arrived

    # a call

    def map(self, fn: Callable[..., Any], *message: Tree | PerClient) -> PerClient:
        """Run a client function at every client of the cohort; each keeps its new private state.

        Args:
            fn: A method of the algorithm that is marked with `@on_client`.
            message: What it is given beside `me`: the same for all, or from `scatter` a row for each client.

        Returns:
            The replies, which arrive when they are needed.
        """
        call = self._next(fn, message, taped=self._tape is not None)
        if self._tape is None:
            return self._send(call)
        return PerClient(self.present, self._tape.call(call), self.group, call, self._example(call))

    def map_untaped(self, fn: Callable[..., Any], *message: Tree | PerClient) -> PerClient:
        """As `map`, for a function that only reads the private state: a running tape does not record it.

        Args:
            fn: A method of the algorithm that is marked with `@on_client`.
            message: As for `map`.

        Returns:
            The replies.
        """
        return self._send(self._next(fn, tuple(m if isinstance(m, PerClient) else detach(m) for m in message)))

    def _next(self, fn: Callable[..., Any], message: tuple[Tree | PerClient, ...], *, taped: bool = False) -> Call:
        self._finish_pending()
        experiment, order = self.engine.experiment, self._in_turn(taped=taped)
        if client_functions(experiment.algorithm).get(fn.__name__) is not getattr(fn, "__func__", None):
            raise TypeError(f"fed.map: {fn.__name__} is not a method of this algorithm marked with @on_client")
        args = tuple(m.rows(self.group, order) if isinstance(m, PerClient) else m for m in message)
        placed = tuple(isinstance(m, PerClient) for m in message)
        if taped and is_ragged((args, reply_example(experiment.algorithm, fn.__name__, experiment.model))):
            raise TypeError(f"fed.map: {fn.__name__} has a ragged message or reply; those cannot be taped")
        self._calls += 1
        self.traffic.trips += 1
        is_sealed = experiment.aggregation.reduction.is_sealed
        return Call(fn.__name__, self.round, self._calls - 1, args, placed, taped, is_sealed)

    def _send(self, call: Call) -> PerClient:
        if call.is_sealed:
            for _ in self._usable_replies(call):  # they stay where they are
                pass
            return PerClient(self.present, None, self.group, call, self._example(call))
        self._pending = ReplyStream(
            call, self._example(call), self.group, self._usable_replies(call), lambda: self.present
        )
        return PerClient.of_stream(self._pending)

    def _usable_replies(self, call: Call) -> Iterator[tuple[tuple[int, ...], Tree]]:
        """Replies as they come; in the end who did not give a usable one is out of the cohort."""
        self._pending = None
        experiment, asked = self.engine.experiment, self.present
        wanted, positive = schema(None), list[str]()  # a sealed reply stays where it is
        if not call.is_sealed:
            wanted, positive = schema(self._example(call)), reply_positive(experiment.algorithm, call.function)
        rejected: list[Rejected] = []
        errors: dict[int, Exception] = {}
        down, up = bytes_down(call, len(self.group.mine(asked))), 0
        for reply in self.engine.call(call, self._in_turn(taped=call.taped)):
            if reply.error is not None:
                errors[reply.clients[0]] = reply.error
            else:
                up += codec.total_size(call.reply_header, reply.tree, len(reply.clients))
            good, tree, others = validate(reply, wanted, positive, self.limits.max_norm)
            rejected += others
            del reply  # one at a time
            if good:
                yield good, tree
            del tree
        each_rank = self.group.all_gather_object([down, up, rejected])
        self.traffic.down += sum(down for down, _, _ in each_rank)
        self.traffic.up += sum(up for _, up, _ in each_rank)
        everywhere = [Rejected(*one) for _, _, some in each_rank for one in some]
        self.leave_out(call, everywhere)
        least = min(self.limits.least, len(asked)) if self.attendance.is_part else self.limits.least
        if len(self.present) < least or (call.taped and self.present != asked):
            self._abandon(call, asked, everywhere, errors)

    def leave_out(self, call: Call, rejected: Sequence[Rejected]) -> None:
        """Go on without clients whose replies to a call cannot be used.

        Args:
            call: The call.
            rejected: Who, and why.
        """
        position = {c: i for i, c in enumerate(self.present)}
        for client, reason, _ in sorted(rejected, key=lambda r: position[r.client]):
            self.attendance.present = tuple(c for c in self.present if c != client)
            self.engine.undo([client])
            self.record.faults.append(Fault(self.names[client], call.round, call.function, reason))

    def _abandon(
        self, call: Call, asked: Sequence[int], rejected: Sequence[Rejected], errors: Mapping[int, Exception]
    ) -> NoReturn:
        mistakes = sorted((r for r in rejected if r.is_mistake), key=lambda r: asked.index(r.client))
        if mistakes and len(mistakes) == len(asked):  # more rounds would not mend it
            first = mistakes[0]
            where = f"{self.names[first.client]}, {call.function}: " if first.reason.startswith("reply ") else ""
            raise ClientError(f"every client failed; the first: {where}{first.reason}") from errors.get(first.client)
        needed = "a taped round needs all" if call.taped else f"{self.limits.min_replies} needed"
        last = self.record.faults[-1]
        raise RoundAbandoned(
            f"round {self.round}: {len(self.present)} of {len(asked)} clients gave a usable reply to {call.function}; "
            f"{needed}; {last.client}: {last.reason}"
        )

    def _in_turn(self, *, taped: bool) -> tuple[int, ...]:
        """Those with most samples first: so several processes end together, and sums have one order everywhere.

        Rows of a message are in this order. A tape goes back in that of the cohort.
        """
        if taped:
            return self.present
        sizes = dict(zip(self.present, self.engine.experiment.data.train.bounds(self.present)[1], strict=True))
        return tuple(sorted(self.present, key=lambda c: -sizes[c]))

    def _finish_pending(self) -> None:
        """Let the replies of the last call come, if nobody has asked for them."""
        if self._pending is not None:
            self._pending.finish()

    def _example(self, call: Call) -> Tree:
        """A reply to the call as it is declared."""
        return reply_example(self.engine.experiment.algorithm, call.function, self.model)

    # sums of replies

    def sum(self, x: PerClient) -> Tree:
        """The sum over the cohort; all that the server needs to see of it.

        Args:
            x: Replies, or a part of them.

        Returns:
            A tree as one client's, with the sums.
        """
        aggregation = self.engine.experiment.aggregation
        total, _ = aggregation.reduction.sum(self, x, None)
        return total if aggregation.noise is None else aggregation.noise.add(self, x, total)

    def mean(self, x: PerClient, weight: PerClient | None = None, stale: Tree = None) -> Tree:
        """The mean over the cohort.

        Args:
            x: Replies, or a part of them.
            weight: One number per client, most often a part of the same replies; without it all count the same, as
                they do where sums have noise.
            stale: Counts for those who were asked and did not answer, by their samples, if the environment has it so.

        Returns:
            A tree as one client's, with the means; of models, the next model of a server optimizer.
        """
        aggregation = self.engine.experiment.aggregation
        if aggregation.noise is None:
            total, by = aggregation.reduction.sum(self, x, weight)
        else:
            total, by = aggregation.reduction.sum(self, x, None)
            total = aggregation.noise.add(self, x, total)

        def divide(v: Tensor) -> Tensor:
            is_fresh = v.is_floating_point() and not v.requires_grad  # a model is large
            return v.div_(by.to(v.dtype)) if is_fresh else v / (by.to(v.dtype) if v.is_floating_point() else by)

        mean = self._count_stale(x, tree_map(divide, total), stale)
        return mean if aggregation.server_step is None else self._step(x, mean)

    def _count_stale(self, x: PerClient, mean: Tree, stale: Tree) -> Tree:
        missing = tuple(c for c in self.asked if c not in set(self.cohort))
        if stale is None or not missing or self.environment.missing != "stale":
            return mean
        absent, present = self.samples(missing), self.samples([c for c in x.clients if c not in set(missing)])
        share = present.sum() / (present.sum() + absent.sum())
        return tree_map(lambda old, new: torch.lerp(old, new, share.to(new.dtype)), stale, mean)

    def _step(self, x: PerClient, mean: Tree) -> Tree:
        """What a server optimizer makes of a mean: its next model, or the mean itself where that is none of models."""
        experiment, sent = self.engine.experiment, self.sent_for(x)
        if experiment.aggregation.server_step is None or sent is None or x.call is None:
            return mean
        key = ".".join(map(str, (x.call.function, *x.path)))
        before = self.sums.moments if self.round > 0 else {}  # a preparation is none of the run's steps
        trained = [k for k in mean if k in experiment.model.trainable]  # statistics are no parameters
        old, new = {k: sent[k] for k in trained}, {k: mean[k] for k in trained}
        memory = self.sums.new_moments.get(key, before.get(key))
        stepped, self.sums.new_moments[key] = experiment.aggregation.server_step.step(old, new, memory)
        return mean | stepped

    def sent_for(self, x: PerClient) -> Tree:
        """The model that clients were sent and of which `x` has their new versions.

        Args:
            x: Replies, or a part of them.

        Returns:
            The model; None if `x` is something else.
        """
        call, experiment = x.call, self.engine.experiment
        if call is None or not is_model(experiment.algorithm, call.function, x.path):
            return None
        part = at_path(x.example, x.path)
        if not isinstance(part, dict) or not part.keys() & experiment.model.trainable.keys():
            return None
        example = schema(part)
        same = (arg for arg, own in zip(call.args, call.placed, strict=True) if not own and schema(arg) == example)
        return next(same, None)

    def _cut_moments(self) -> None:
        """Let no gradient flow further back than here."""
        self.sums.new_moments = {k: detach(v) for k, v in self.sums.new_moments.items()}

    # single replies

    def keep(self, x: PerClient) -> PerClient:
        """Keep replies that are used more than once; otherwise the first sum frees large ones.

        Args:
            x: Replies.

        Returns:
            The same replies.
        """
        if x.stream is not None:
            x.stream.keep()
        return x

    def gather(self, x: PerClient, what: str, clients: Sequence[int] | None = None) -> Tree:
        """Look at individual replies. The run's record says that the server saw them.

        Args:
            x: Replies, or a part of them.
            what: Names them, for the report of what the server saw.
            clients: Whose; all if None.

        Returns:
            A tree with a leading dimension of clients.
        """
        self.engine.experiment.aggregation.refuse_look(self.title, what)
        self.record.gathered.add(what)
        return x.everywhere(clients)

    def scatter(self, rows: Tree) -> PerClient:
        """A different value for each client.

        Args:
            rows: A tree with a leading dimension, in the order of `cohort`.

        Returns:
            A message for `map`.
        """
        for path, leaf in items(rows):
            if leaf.shape[:1] != (len(self.cohort),):
                raise ValueError(
                    f'scatter: "{path}" has {list(leaf.shape)}, not a row for each of {len(self.cohort)} clients'
                )
        return PerClient(self.cohort, rows)

    # gradients through rounds

    def tape(self, watched: Tree = None) -> Tree:
        """Record from here on, to differentiate through the following calls.

        Args:
            watched: A tree of the server's to differentiate with respect to.

        Returns:
            The same values, as the tensors to compute with.
        """
        self.engine.experiment.aggregation.refuse_tape(self.title)
        self._finish_pending()
        self._cut_moments()
        leaves_of_graph = tree_map(lambda v: v.detach().requires_grad_(), watched)
        self._tape = Tape(leaves_of_graph, self.model.like, self._all_replies, self._pull_back)
        return self._tape.watched

    def backward(self, loss: Tensor) -> Tree:
        """Send cotangents back along the tape; afterwards every client has `me.grad`.

        Args:
            loss: A scalar computed from replies since `tape`.

        Returns:
            The gradient with respect to `watched`.
        """
        if self._tape is None:
            raise RuntimeError("fed.backward without fed.tape")
        self._finish_pending()
        tape, self._tape = self._tape, None
        gradient = tape.backward(loss)
        self._cut_moments()
        assert isinstance(self.engine, Taping)
        self.engine.finish_backward()
        return gradient

    def _all_replies(self, call: Call) -> Tree:
        """The usable replies in the order of the cohort; of those on this rank."""
        return in_order(list(self._usable_replies(call)), self.group.mine(self.present), self._example(call))

    def _pull_back(self, call: Call, cotangent: Tree) -> tuple[Tree, ...]:
        """The cotangent of a call's message from that of its replies."""
        message, clients = outline(call.args, call.placed), self.present
        down = codec.size(call.reply_header, cotangent, stacked=True)
        self.traffic.count(len(clients), down, up=codec.size(call.reply_header, message))
        totals: list[Tree] = [None] * len(call.args)
        parts: list[list[tuple[tuple[int, ...], Tree]]] = [[] for _ in call.args]
        assert isinstance(self.engine, Taping)
        for some, args in self.engine.pull_back(call.number, clients, cotangent):
            for i, (arg, own) in enumerate(zip(args, call.placed, strict=True)):
                if own:
                    parts[i].append((some, arg))
                else:
                    totals[i] = arg if totals[i] is None else tree_map(torch.add, totals[i], arg)
        for i, (arg, own) in enumerate(zip(call.args, call.placed, strict=True)):
            if not own and totals[i] is None:  # no client of the cohort is on this rank
                totals[i] = tree_map(torch.zeros_like, arg)
        totals = self.group.total(totals)  # the same message went to the clients of all ranks
        here = self.group.mine(clients)
        return tuple(
            in_order(part, here, example) if own else total
            for part, total, own, example in zip(parts, totals, call.placed, message, strict=True)
        )

    # rounds of another form

    @contextmanager
    def exchange(self, number: int, *, ask_all: bool = False) -> Iterator[tuple[int, ...]]:
        """One of several exchanges of a round, with the clients whose replies arrive in it.

        Args:
            number: Which exchange of the round, from 0 on.
            ask_all: The others reply too, as a tape needs it; the algorithm must not use their replies.

        Returns:
            A context manager that gives the clients whose replies arrive.
        """
        here = self._arriving(number, self.cohort)
        if ask_all:
            yield here
            return
        with self._only(here):
            yield here

    @contextmanager
    def among(self, clients: Sequence[int]) -> Iterator[None]:
        """Make the following calls to a part of the cohort.

        Args:
            clients: Who, of the cohort.

        Returns:
            A context manager, after which the cohort is as before, without clients that were lost meanwhile.
        """
        before, self.attendance.is_part = self.attendance.is_part, True
        try:
            with self._only(tuple(clients)):
                yield
        finally:
            self.attendance.is_part = before

    @contextmanager
    def _only(self, some: tuple[int, ...]) -> Iterator[None]:
        everybody = self.cohort
        self.attendance.present = some
        try:
            yield
        finally:
            lost = set(some) - set(self.cohort)
            self.attendance.present = tuple(c for c in everybody if c not in lost)

    def fused_round(
        self, compute: Callable[[Tree, Tree, Callable[[], View]], FusedRound | None], server: Tree
    ) -> Tree | None:
        """A round as one computation, if the cohort's states are stacked in this process.

        Args:
            compute: Gets the states, `server` and a function for the stacked training samples. It must give what the
                calls of a round give, and counts as much traffic.
            server: The server's state.

        Returns:
            The server's new state. None if clients are on their own, a number is out of bounds or memory is too small:
            then the calls must be made, which find out at which client.
        """
        cohort, engine, experiment = self.cohort, self.engine, self.engine.experiment
        has_memory = experiment.aggregation.server_step is not None or experiment.optimizer_state is not None
        if not experiment.aggregation.is_plain or has_memory or not is_stacking(engine):
            return None
        held = engine.stacked_states(cohort)
        if held is None or len(cohort) < self.limits.least:
            return None
        try:
            fused = compute(held, server, self._stacked_samples)
        except torch.OutOfMemoryError:  # all clients at once are more than a device holds
            return None
        if fused is None:
            return None
        new = [*(v for v in changed_leaves(fused.state, held) if v is not None), *leaves(fused.server)]
        sums = torch.stack([wide(fused.largest), *(wide(v.sum()) for v in new)])  # of what is not finite is not
        if not (fused.largest <= self.limits.max_norm and bool(torch.isfinite(sums).all())):
            return None
        engine.commit_stacked_states(cohort, fused.state, held)
        for exchange in fused.exchanges:
            here = {"round": self.round, "first_call": self._calls, "clients": len(cohort)}
            count_fused(self.traffic, exchange, experiment.reply_sizes[exchange.function], **here)
            self._calls += exchange.times
        return fused.server

    def _stacked_samples(self) -> View:
        rows = self.engine.experiment.data.train
        at, mask = rows.padded(self.cohort)
        x, y = to_device((take(rows.x, at), take(rows.y, at)), self.model.device)
        return View(x, y, mask.to(y.device, self.model.dtype))

    # what an algorithm may know

    def report(self, **values: float | Tensor | list[Tensor]) -> None:
        """Report numbers of this round to people; nothing is computed from them.

        Args:
            values: Numbers, or lists of them, by name; they are recorded with the round and shown in reports.
        """
        for name, value in values.items():
            self.record.reported[name] = [float(v) for v in value] if isinstance(value, list) else float(value)

    @property
    def round(self) -> int:
        """The number of this round, from 1 on; up to 0 while a run is prepared."""
        return self.attendance.round

    @property
    def cohort(self) -> tuple[int, ...]:
        """Clients whose replies were accepted."""
        self._finish_pending()
        return self.attendance.present

    @property
    def present(self) -> tuple[int, ...]:
        """As `cohort`, but does not wait for replies that are on their way."""
        return self.attendance.present

    @property
    def asked(self) -> tuple[int, ...]:
        """Clients that were asked to take part."""
        return self.attendance.asked

    @property
    def clients(self) -> int:
        """The number of all clients."""
        return len(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all clients."""
        return self.engine.experiment.data.clients

    @property
    def model(self) -> Model:
        """The model that all clients train."""
        return self.engine.experiment.model

    @property
    def task(self) -> str:
        """The kind of targets, such as "classification"."""
        return self.engine.experiment.task.kind

    @property
    def seed(self) -> int:
        """All randomness of the run follows from it."""
        return self.engine.experiment.seed

    @property
    def environment(self) -> Environment:
        """What makes clients unequal."""
        return self.engine.experiment.environment

    @property
    def solver(self) -> LocalSolver:
        """How clients take local steps."""
        return self.engine.experiment.solver

    def samples(self, clients: Sequence[int]) -> Tensor:
        """Numbers of training samples of clients, as reported when they joined.

        Args:
            clients: Their positions.

        Returns:
            One number per client.
        """
        sizes = self.engine.experiment.data.train.bounds(clients)[1]
        return self.model.like.new_tensor(sizes, dtype=widest(self.model.device))

    def steps(self, clients: Sequence[int], epochs: int) -> Tensor:
        """Numbers of local steps that clients take, from what they reported when they joined.

        Args:
            clients: Their positions.
            epochs: Passes over the training samples.

        Returns:
            One number per client, as `me.steps(epochs)` there.
        """
        counts = self.solver.count_steps(self.engine.experiment, clients, epochs)
        return self.model.like.new_tensor(counts, dtype=widest(self.model.device))

    def places(self, clients: Sequence[int]) -> Tensor:
        """Positions of clients, for tables of the server that have an entry for each client.

        Args:
            clients: As in `cohort`.

        Returns:
            Their positions, as a tensor.
        """
        return self.model.like.new_tensor(clients, dtype=torch.int64)

    @property
    def title(self) -> str:
        """The name of the algorithm in tables."""
        algorithm = self.engine.experiment.algorithm
        return algorithm.title or type(algorithm).__name__


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
