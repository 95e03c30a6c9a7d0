"""A worker of the pool: runs clients whose private states, messages and replies lie in shared memory.

It holds nothing that another worker could not compute again: what it is asked follows from the request and from memory
that nobody writes meanwhile, and it writes only where nobody reads yet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import sent_example
from fedtailor.core.client import Call, Outcome, evaluate, initial, invoke, personal, pull_back
from fedtailor.core.me import Setting
from fedtailor.core.states import changed, refuse_other
from fedtailor.core.trees import Tree, detach, leaves, schema, tree_map
from fedtailor.engines.inprocess import explained, grouped, refuse_infinite
from fedtailor.engines.shared import Layout, Memory, Strides, put, put_all
from fedtailor.local import dense, equilibrium

Spot = tuple[int, list[Strides]]  # a row, and how the tensors in it lie


class Task(NamedTuple):
    """What is asked for one client. Rows are those of the memory of private states."""

    client: int
    position: int = 0  # in the message and among the replies
    source: int = 0  # row of its private state
    target: int = 0  # row for its next private state, or for the cotangent of this one
    grad: Spot | None = None  # `me.grad`
    cotangent: Spot | None = None  # of the private state after a taped call
    back: int = 0  # position among the cotangents of the replies
    at: int = 0  # where its personal model goes


class Worker:
    """Answers requests, in a process of its own or, to find out what went wrong there, in this one."""

    def __init__(self, setting: Setting, rows: Memory, regions: Memory, kept: Layout, chunk: int = 0) -> None:
        self.setting = setting
        self.chunk = chunk  # clients in a stack; 0: one after the other
        self.rows, self.regions = rows, regions
        self.kept = kept  # private state and buffers
        self.state = Layout.of(kept.tree["state"])
        self._schema = schema(kept.tree)
        self._replies: dict[str, Layout] = {}
        self._elsewhere: set[str] = set()  # functions whose replies are not what training makes first
        self._tape = 0
        self._graphs: dict[tuple[int, int], Outcome] = {}  # of taped calls, by call and client

    def handle(self, request: dict[str, Any]) -> tuple[list[Any], list[bytes]]:
        """An answer per task, and as bytes what has no place in shared memory."""
        if request["tape"] != self._tape:
            self._tape, self._graphs = request["tape"], {}
        tasks = [Task(*task) for task in request["tasks"]]
        apart: list[bytes] = []
        do = {"start": self._start, "call": self._call, "pull back": self._pull_back, "evaluate": self._evaluate}
        return do[request["do"]](request, tasks, apart), apart

    def reply_layout(self, function: str) -> Layout:
        """Of the reply that a client function declares."""
        if function not in self._replies:
            self._replies[function] = Layout.of(sent_example(self.setting.algorithm, function, self.setting.model))
        return self._replies[function]

    def message(self, found: dict[str, Any]) -> Tree:
        """A tree that the server put into memory."""
        return Layout.from_json(found).read(self.regions.bytes, found["at"], found["strides"])

    def _start(self, request: dict[str, Any], tasks: Sequence[Task], apart: list[bytes]) -> list[Any]:
        for task in tasks:
            state, buffers = initial(self.setting, [task.client], is_stacked=False)
            self._keep(task.target, {"state": state, "buffers": buffers})
        return [{}] * len(tasks)

    def _call(self, request: dict[str, Any], tasks: Sequence[Task], apart: list[bytes]) -> list[Any]:
        call = self._call_of(request)
        layout = self.reply_layout(call.function)
        places = Layout.of(layout.tree, request["rows"]).places(self.regions.bytes, request["reply"])
        if self.chunk and len(tasks) > 1 and not call.taped and (found := self._stacked(call, tasks, layout, places)):
            return found
        answers: list[Any] = []
        for task in tasks:
            try:
                outcome, is_same = self._run(call, task)
                reply = detach(outcome.reply)
                if layout.fits(reply):
                    answers.append({"same": is_same, "strides": _put(places, task.position, reply)})
                else:  # the server will refuse it, and say why
                    apart.append(codec.encode({}, reply))
                    answers.append({"same": is_same, "apart": True})
            except Exception as error:
                told = explained(self.setting, call, task.client, error)
                answers.append({"error": str(told), "trace": traceback.format_exc()})
        return answers

    def _stacked(self, call: Call, tasks: Sequence[Task], layout: Layout, places: Sequence[Tensor]) -> list[Any] | None:
        """Clients side by side; None if something is wrong with one of them: each for itself will tell."""
        by_client = {task.client: task for task in tasks}
        answers: dict[int, Any] = {}
        for clients in grouped(self.setting, list(by_client), self.chunk):
            group = [by_client[c] for c in clients]
            at = [task.position for task in group]
            held = _stack([self._held(task.source) for task in group])
            grads = [self._at(task.grad) for task in group]
            args = tuple(
                tree_map(lambda v, at=at: v[at], arg) if own else arg
                for arg, own in zip(call.args, call.placed, strict=True)
            )
            mine = held["state"], held["buffers"], None if grads[0] is None else _stack(grads)
            wanted = _together(places, at) if call.function not in self._elsewhere else []
            try:
                with dense.into(wanted) as made:
                    outcome = invoke(self.setting, clients, replace(call, args=args), *mine, is_stacked=True)
                kept = detach({"state": outcome.state, "buffers": outcome.buffers})
                refuse_other(schema(kept, stacked=True), self._schema)
                new = changed(kept, held)
                refuse_infinite(new)
            except Exception:
                return None
            reply = detach(outcome.reply)
            is_same = all(v is None for v in new)
            if not layout.fits(_row(reply, 0)):
                return None
            if not is_same:
                for i, task in enumerate(group):
                    self._keep(task.target, _row(kept, i))
            there = [_is_at(v, place) for v, place in zip(leaves(reply), wanted or places, strict=True)]
            if wanted and not any(there):
                self._elsewhere.add(call.function)
            norms = dict(enumerate(_norms(leaves(reply), made.norms).tolist())) if any(there) else {}
            for i, strides in enumerate(self._delivered(leaves(reply), there, places, at)):
                answers[clients[i]] = {"same": is_same, "strides": strides, "norm": norms.get(i)}
        return [answers[task.client] for task in tasks]

    def _delivered(
        self, reply: list[Tensor], there: list[bool], places: Sequence[Tensor], at: Sequence[int]
    ) -> Iterator[list[Strides]]:
        """Bring a stacked reply to its places, but for what was made there; tells how the tensors of each row lie."""
        if all(there):
            yield from ([] for _ in at)
            return
        shared = self.regions.bytes.untyped_storage().data_ptr()
        # what was made in the place of another must be away before that one comes
        apart = [
            v.clone() if not here and v.untyped_storage().data_ptr() == shared else v
            for v, here in zip(reply, there, strict=True)
        ]
        for i, position in enumerate(at):
            each = zip(apart, there, places, strict=True)
            strides = [None if here else put(place[position], v[i]) for v, here, place in each]
            yield strides if any(strides) else []

    def _run(self, call: Call, task: Task) -> tuple[Outcome, bool]:
        """One client's call; whether its private state is as it was, else the new one is in its target row."""
        held, outcome = self._invoke(call, task)
        kept = detach({"state": outcome.state, "buffers": outcome.buffers})
        refuse_other(schema(kept), self._schema)
        new = changed(kept, held)
        refuse_infinite(new)
        is_same = all(v is None for v in new)
        if not is_same:
            self._keep(task.target, kept)
        if call.taped:
            self._graphs[call.number, task.client] = outcome
        return outcome, is_same

    def _invoke(self, call: Call, task: Task) -> tuple[Tree, Outcome]:
        held = self._held(task.source)
        args = tuple(
            tree_map(lambda v: v[[task.position]][0], arg) if own else arg
            for arg, own in zip(call.args, call.placed, strict=True)
        )
        mine = replace(call, args=args)
        grad = self._at(task.grad)
        return held, invoke(self.setting, [task.client], mine, held["state"], held["buffers"], grad, is_stacked=False)

    def _pull_back(self, request: dict[str, Any], tasks: Sequence[Task], apart: list[bytes]) -> list[Any]:
        call = self._call_of(request)
        cotangents = self.message(request["cotangent"])
        layout = Layout.from_json(request["back"])
        places = layout.places(self.regions.bytes, request["back"]["at"])
        answers = []
        for task in tasks:
            outcome = self._graphs.pop((call.number, task.client), None) or self._invoke(call, task)[1]
            mine = tree_map(lambda v, task=task: v[[task.back]][0], cotangents)
            state, args = pull_back(outcome, self._at(task.cotangent), mine)
            lies = self.state.write(state, self.rows.bytes, task.target * self.kept.size)
            answers.append({"state": lies, "args": _put(places, task.back, args)})
        return answers

    def _evaluate(self, request: dict[str, Any], tasks: Sequence[Task], apart: list[bytes]) -> list[Any]:
        server, splits = self.message(request["message"]), request["splits"]
        layout = None if request["model"] is None else Layout.from_json(request["model"])
        answers: list[Any] = []
        for task in tasks:
            held = self._held(task.source)
            mine = held["state"], held["buffers"], server
            model = personal(self.setting, [task.client], request["round"], *mine, is_stacked=False)
            found = evaluate(self.setting, [task.client], model, splits, is_stacked=False)
            metrics = {split: {k: v.item() for k, v in values.items()} for split, values in found.items()}
            if layout is not None and layout.fits(model):
                answers.append({"metrics": metrics, "strides": layout.write(model, self.regions.bytes, task.at)})
            else:
                apart.append(codec.encode({}, model))
                answers.append({"metrics": metrics, "apart": True})
        return answers

    def _call_of(self, request: dict[str, Any]) -> Call:
        h = request["call"]
        args = self.message(request["message"])
        return Call(h["function"], h["round"], h["call"], args, tuple(h["placed"]), h["taped"])

    def _held(self, row: int) -> Tree:
        return tree_map(torch.clone, self.kept.read(self.rows.bytes, row * self.kept.size))

    def _keep(self, row: int, kept: Tree) -> None:
        for place, leaf in zip(self.kept.places(self.rows.bytes, row * self.kept.size), leaves(kept), strict=True):
            place.copy_(leaf)

    def _at(self, spot: Spot | None) -> Tree:
        if spot is None:
            return None
        return tree_map(torch.clone, self.state.read(self.rows.bytes, spot[0] * self.kept.size, spot[1]))


def _put(places: Sequence[Tensor], position: int, tree: Tree) -> list[Strides]:
    """Put a tree into its row of a stack."""
    return put_all([place[position] for place in places], tree)


def _together(places: Sequence[Tensor], at: Sequence[int]) -> list[Tensor]:
    """The rows `at` of each place as one stack, if they follow one another; else nothing."""
    first = at[0]
    return [p[first : first + len(at)] for p in places] if list(at) == list(range(first, first + len(at))) else []


def _norms(reply: Sequence[Tensor], known: Mapping[int, Tensor]) -> Tensor:
    """The norm of the reply of each client of a stack; that of some tensors is known by their address."""
    each = [
        found
        if (found := known.get(v.data_ptr())) is not None
        else torch.linalg.vector_norm(v.reshape(len(v), -1), dim=1)
        for v in reply
        if v.is_floating_point()
    ]
    return torch.stack([v.double() for v in each]).square().sum(0).sqrt()


def _is_at(v: Tensor, place: Tensor) -> bool:
    return (v.data_ptr(), v.shape, v.stride()) == (place.data_ptr(), place.shape, place.stride())


def _stack(trees: Sequence[Tree]) -> Tree:
    return tree_map(lambda *rows: torch.stack(rows), *trees)


def _row(tree: Tree, at: int) -> Tree:
    return tree_map(lambda v: v[at], tree)


def serve(worker: Worker, connection: Connection, others: Sequence[Connection], parent: int, number: int) -> None:
    """The life of a worker process: requests until the pool is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interruption is the server's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for other in others:  # else those workers would not see the end of the server
        other.close()
    torch.set_num_threads(1)
    equilibrium.leave_watchers()
    place = Place(number)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        while True:
            place.wait_at_home()
            request = connection.recv_bytes()
            place.go_anywhere()
            for part in _answer(worker, request):
                connection.send_bytes(part)
    except (EOFError, OSError):
        return


class Place:
    """Where a worker runs. Workers that wake up at the same time do so on different cores, and push nobody aside, least
    of all the server that has others to wake. Once awake they run wherever the system likes.
    """

    def __init__(self, number: int) -> None:
        self._all: set[int] = set()
        with suppress(OSError, AttributeError):  # not every system has this
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            self._all = os.sched_getaffinity(0)
        self._home = {sorted(self._all)[number % len(self._all)]} if self._all else set()

    def wait_at_home(self) -> None:
        self._go(self._home)

    def go_anywhere(self) -> None:
        self._go(self._all)

    def _go(self, cores: set[int]) -> None:
        if len(self._all) > 1:
            with suppress(OSError):
                os.sched_setaffinity(0, cores)


def _answer(worker: Worker, request: bytes) -> list[bytes]:
    apart: list[bytes] = []
    try:
        with equilibrium.watched() as solves:
            answers, apart = worker.handle(json.loads(request))
        answer: dict[str, Any] = {"answers": answers, "apart": len(apart), "solves": solves.tally}
    except Exception:
        answer = {"failed": traceback.format_exc()}
    sys.stdout.flush()
    return [json.dumps(answer).encode(), *apart]


def _end_with(parent: int) -> None:
    """The server may be killed while a client trains for long."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
