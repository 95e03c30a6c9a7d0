"""The server's half of a federation: map, sum, mean, scatter, gather, tape and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedtailor.core import calling, rounds
from fedtailor.core.aggregation import SumLog
from fedtailor.core.algorithm import client_functions, reply_example
from fedtailor.core.client import Call
from fedtailor.core.context import View
from fedtailor.core.data import take
from fedtailor.core.engine import Engine, Taping, is_stacking
from fedtailor.core.environment import Environment
from fedtailor.core.experiment import LocalSolver
from fedtailor.core.model import Model
from fedtailor.core.per_client import PerClient
from fedtailor.core.process_group import ALONE, ProcessGroup
from fedtailor.core.record import Attendance, Record
from fedtailor.core.replies import ReplyStream
from fedtailor.core.reply_validation import Limits
from fedtailor.core.server_steps import stepped
from fedtailor.core.tape import Tape
from fedtailor.core.traffic import FusedRound, Traffic, count_fused
from fedtailor.core.trees import Tree, changed, detach, is_ragged, items, leaves, moved, tree_map, wide, widest


@dataclass
class Federation:
    """What an algorithm's `round` is given."""

    engine: Engine
    limits: Limits = field(default_factory=Limits)
    group: ProcessGroup = ALONE
    traffic: Traffic = field(default_factory=Traffic)
    record: Record = field(default_factory=Record)
    sums: SumLog = field(default_factory=SumLog)
    attendance: Attendance = field(default_factory=Attendance)
    _calls: int = 0
    _pending: ReplyStream | None = None
    _tape: Tape | None = None

    # what an algorithm does

    def map(self, fn: Callable[..., Any], *message: Tree | PerClient) -> PerClient:
        """Every client of the cohort runs `fn(me, *message)` and keeps its new private state; the replies come back."""
        call = self._next(fn, message, taped=self._tape is not None)
        return self._asked(call) if self._tape is None else self._tape.call(self, call)

    def map_untaped(self, fn: Callable[..., Any], *message: Tree | PerClient) -> PerClient:
        """As `map`, for a function that only looks at the private state: a running tape does not record it."""
        return self._asked(self._next(fn, tuple(m if isinstance(m, PerClient) else detach(m) for m in message)))

    def sum(self, x: PerClient) -> Tree:
        """The sum over the cohort; all that the server needs to see of it."""
        return self.engine.experiment.aggregation.total(self, x)

    def mean(self, x: PerClient, weight: PerClient | None = None, stale: Tree = None) -> Tree:
        """The mean over the cohort, weighted by one number per client.

        `stale` counts for those who were asked and did not answer, by their samples, if the environment has it so.
        """
        mean = self._stale_mean(x, weight, stale)
        return mean if self.engine.experiment.server_steps is None else stepped(self, x, mean)

    def _stale_mean(self, x: PerClient, weight: PerClient | None, stale: Tree) -> Tree:
        mean = self.engine.experiment.aggregation.mean(self, x, weight)
        if stale is None or self.environment.missing != "stale":
            return mean
        here = set(self.cohort)
        missing = tuple(c for c in self.asked if c not in here)
        if not missing:
            return mean
        absent, present = self.samples(missing), self.samples([c for c in x.clients if c not in set(missing)])
        share = present.sum() / (present.sum() + absent.sum())
        return tree_map(lambda old, new: torch.lerp(old, new, share.to(new.dtype)), stale, mean)

    def keep(self, x: PerClient) -> PerClient:
        """Replies that will be used more than once: large ones are let go of by the first sum over them."""
        if x.stream is not None:
            x.stream.keep()
        return x

    def gather(self, x: PerClient, what: str, clients: Sequence[int] | None = None) -> Tree:
        """Look at single replies, of all or some clients. `what` names them, for the report of what the server saw."""
        self.engine.experiment.aggregation.refuse_look(self, what)
        self.record.gathered.add(what)
        return x.everywhere(clients)

    def scatter(self, rows: Tree) -> PerClient:
        """A different value for each client: `rows` has a leading dimension, in the order of `cohort`."""
        for path, leaf in items(rows):
            if leaf.shape[:1] != (len(self.cohort),):
                raise ValueError(
                    f'scatter: "{path}" has {list(leaf.shape)}, not a row for each of {len(self.cohort)} clients'
                )
        return PerClient(self.cohort, rows)

    def tape(self, watched: Tree = None) -> Tree:
        """Record from here on. Returns `watched`, a tree of the server's, as the tensors to differentiate by."""
        self.engine.experiment.aggregation.refuse_tape(self)
        self._settled()
        self.sums.cut()
        self._tape = Tape(tree_map(lambda v: v.detach().requires_grad_(), watched), self.model.like)
        return self._tape.watched

    def backward(self, loss: Tensor) -> Tree:
        """Send cotangents back along the tape. Then every client has `me.grad`; returns the gradient by `watched`."""
        if self._tape is None:
            raise RuntimeError("fed.backward without fed.tape")
        self._settled()
        tape, self._tape = self._tape, None
        gradient = tape.backward(loss)
        self.sums.cut()
        assert isinstance(self.engine, Taping)
        self.engine.finish_backward()
        return gradient

    def report(self, **values: float | Tensor | list[Tensor]) -> None:
        """Numbers of this round for people: they are recorded with it and shown, nothing is computed from them."""
        for name, value in values.items():
            self.record.reported[name] = [float(v) for v in value] if isinstance(value, list) else float(value)

    @contextmanager
    def exchange(self, number: int, *, ask_all: bool = False) -> Iterator[tuple[int, ...]]:
        """One of several exchanges of a round, with those whose replies arrive in it.

        With `ask_all` the others reply too, as a tape needs it, and it is up to the algorithm not to use that.
        """
        everybody = self.cohort
        here = rounds.arriving(self, number, everybody)
        if ask_all:
            yield here
            return
        self.attendance.present = here
        try:
            yield here
        finally:
            lost = set(here) - set(self.cohort)
            self.attendance.present = tuple(c for c in everybody if c not in lost)

    def fused_round(
        self, compute: Callable[[Tree, Tree, Callable[[], View]], FusedRound | None], server: Tree
    ) -> Tree | None:
        """Where the cohort's states lie stacked in this process: a round as one computation on all of them.

        `compute` gets the states, `server`, and a function for the training samples, which are stacked too.
        It must give what the calls give, and counts as much traffic. None where clients are on their own or a number
        is out of bounds: then make the calls, which find out whose it is.
        """
        cohort, engine, experiment = self.cohort, self.engine, self.engine.experiment
        has_memory = experiment.server_steps is not None or experiment.optimizer_state is not None
        if experiment.aggregation.calls_only or has_memory or not is_stacking(engine):
            return None
        held = engine.stacked_states(cohort)
        if held is None or len(cohort) < self.limits.least:
            return None
        if (fused := _computed(compute, held, server, self._stacked)) is None:
            return None
        new = [*(v for v in changed(fused.state, held) if v is not None), *leaves(fused.server)]
        sums = torch.stack([wide(fused.largest), *(wide(v.sum()) for v in new)])  # of what is not finite is not
        if not (fused.largest <= self.limits.max_norm and bool(torch.isfinite(sums).all())):
            return None
        engine.commit_stacked_states(cohort, fused.state, held)
        for exchange in fused.exchanges:
            here = {"round": self.round, "first_call": self._calls, "clients": len(cohort)}
            count_fused(self.traffic, exchange, experiment.reply_sizes[exchange.function], **here)
            self._calls += exchange.times
        return fused.server

    # what an algorithm may know

    @property
    def round(self) -> int:
        """Its number."""
        return self.attendance.round

    @property
    def cohort(self) -> tuple[int, ...]:
        """Who takes part, as far as their replies were usable."""
        self._settled()
        return self.attendance.present

    @property
    def asked(self) -> tuple[int, ...]:
        """Who was asked to take part."""
        return self.attendance.asked

    @property
    def clients(self) -> int:
        """How many clients there are in all."""
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
        """The kind of what is predicted."""
        return self.engine.experiment.task.kind

    @property
    def seed(self) -> int:
        """From which all randomness of the run follows."""
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
        """Training samples of clients, as they told when they came."""
        sizes = self.engine.experiment.data.train.bounds(clients)[1]
        return self.model.like.new_tensor(sizes, dtype=widest(self.model.device))

    def places(self, clients: Sequence[int]) -> Tensor:
        """The numbers of clients, for tables of the server that have a place for each."""
        return self.model.like.new_tensor(clients, dtype=torch.int64)

    # how it comes about

    @property
    def present(self) -> tuple[int, ...]:
        """As `cohort`, while replies are on their way."""
        return self.attendance.present

    def _stacked(self) -> View:
        """The cohort's training samples, for `fused_round`."""
        rows = self.engine.experiment.data.train
        at, mask = rows.padded(self.cohort)
        x, y = moved((take(rows.x, at), take(rows.y, at)), self.model.device)
        return View(x, y, mask.to(y.device, self.model.dtype))

    def forget_pending(self) -> None:
        """The replies to the last call are on their way."""
        self._pending = None

    def _settled(self) -> None:
        """Let the replies of the last call come, if nobody has asked for them."""
        if self._pending is not None:
            self._pending.finish()

    def _next(self, fn: Callable[..., Any], message: tuple[Tree | PerClient, ...], *, taped: bool = False) -> Call:
        self._settled()
        experiment, order = self.engine.experiment, calling.in_turn(self, taped=taped)
        if client_functions(experiment.algorithm).get(fn.__name__) is not getattr(fn, "__func__", None):
            raise TypeError(f"fed.map: {fn.__name__} is not a method of this algorithm marked with @on_client")
        args = tuple(m.rows(self.group, order) if isinstance(m, PerClient) else m for m in message)
        placed = tuple(isinstance(m, PerClient) for m in message)
        if taped and is_ragged((args, reply_example(experiment.algorithm, fn.__name__, experiment.model))):
            raise TypeError(f"fed.map: {fn.__name__} has a ragged message or reply; those cannot be taped")
        self._calls += 1
        self.traffic.trips += 1
        largest = self.limits.max_norm if experiment.aggregation.secure_sum else None
        return Call(fn.__name__, self.round, self._calls - 1, args, placed, taped, largest)

    def _asked(self, call: Call) -> PerClient:
        experiment = self.engine.experiment
        example = reply_example(experiment.algorithm, call.function, experiment.model)
        if experiment.aggregation.is_closed:
            rows = calling.all_replies(self, call)
            closed = experiment.aggregation.closed(self, call, rows)
            return PerClient.of_call(self.present, closed, self.group, call, example)
        self._pending = ReplyStream(self, call, example)
        return PerClient.of_stream(self._pending)

    def weighted_sum(self, x: PerClient, weight: PerClient | None = None) -> tuple[Tree, Tensor | None]:
        """The sum over the cohort of replies that may be looked at, and of the weights."""
        if x.stream is not None:
            totals, weights = x.stream.weighted_sum(x.path, weight)
            return self.group.total(totals), None if weights is None else self.group.total(weights)
        if weight is None:
            return self.group.total(tree_map(lambda v: v.sum(0), x.rows(self.group))), None
        both = tuple(c for c in x.clients if c in set(weight.clients))  # a client may be lost between two calls
        w = weight.rows(self.group, both)
        parts = tree_map(lambda v: torch.tensordot(w.to(v.dtype), v, dims=1), x.rows(self.group, both))
        return self.group.total(parts), self.group.total(w.sum())

    def open_mean(self, x: PerClient, weight: PerClient | None) -> Tree:
        """The mean of replies that may be looked at."""
        totals, weights = self.weighted_sum(x, weight)
        by = self.model.like.new_tensor(len(x.clients), dtype=torch.int64) if weights is None else weights

        def divided(v: Tensor) -> Tensor:
            is_own = x.stream is not None and v.is_floating_point()  # made here, and nobody else has it
            return v.div_(by.to(v.dtype)) if is_own else v / (by.to(v.dtype) if v.is_floating_point() else by)

        return tree_map(divided, totals)

    def run_round(self, round: int, cohort: Sequence[int], server: Tree) -> Tree:
        """One round of the algorithm; when it is abandoned everything is as before and `RoundAbandoned` is raised."""
        return rounds.run(self, round, cohort, server)

    def begin_attempt(self) -> None:
        """Forget what an attempt at the round has left behind."""
        self._calls, self._tape, self._pending, self.record.reported = 0, None, None, {}
        self.sums.secure, self.sums.new_moments = 0, {}

    def play(self, server: Tree) -> Tree:
        """The algorithm's round, to its last reply."""
        with torch.enable_grad():  # a tape must record whatever the caller's mode
            new = self.engine.experiment.algorithm.round(self, server)
            self._settled()
            self.sums.cut()
            # machines of different kinds must not drift apart
            server, self.sums.new_moments = self.group.broadcast((detach(new), self.sums.new_moments))
            return server


def _computed(
    compute: Callable[[Tree, Tree, Callable[[], View]], FusedRound | None],
    held: Tree,
    server: Tree,
    samples: Callable[[], View],
) -> FusedRound | None:
    """None also where all clients at once are more than a device holds."""
    try:
        return compute(held, server, samples)
    except torch.OutOfMemoryError:
        return None
