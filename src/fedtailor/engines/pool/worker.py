"""A worker of the pool: runs clients whose private states, messages and replies lie in shared memory.

It holds nothing that another worker could not compute again: what it is asked follows from the request and from memory
that nobody writes meanwhile, and it writes only where nobody reads yet.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import reply_example
from fedtailor.core.client import Call, Outcome, initial, invoke, personal, pull_back
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Params, Tree, changed_leaves, detach, leaves, schema, to_device, tree_map
from fedtailor.engines import devices, machine
from fedtailor.engines.inprocess import client_error, refuse_infinite
from fedtailor.engines.pool.shared_memory import Layout, Memory, Strides, clone_overlapping, is_at, put, put_all
from fedtailor.engines.states import refuse_other
from fedtailor.metrics.evaluation import evaluate
from fedtailor.training.kernels.output_buffers import output_buffers


class Spot(NamedTuple):
    """A row that holds a cotangent."""

    row: int
    strides: list[Strides]  # how its tensors lie


class ClientTask(NamedTuple):
    """What is asked for one client. Rows are those of the memory of private states."""

    client: int
    position: int = 0  # in the message and among the replies
    source: int = 0  # row of its private state
    target: int = 0  # row for its next private state, or for the cotangent of this one
    grad: Spot | None = None  # `me.grad`
    cotangent: Spot | None = None  # of the private state after a taped call
    back: int = 0  # position among the cotangents of the replies
    at: int = 0  # where its personal model goes, or the replies of its group
    row: int = 0  # of its reply there


class StateRows:
    """Private states with their buffers, and cotangents of states, in the rows of a shared memory."""

    def __init__(self, memory: Memory, layout: Layout) -> None:
        self.memory, self.layout = memory, layout
        self.schema = schema(layout.tree)
        self._cotangent = Layout.of(layout.tree["state"])

    def stacks(self, rows: int) -> list[Tensor]:
        return self.layout.all_places(self.memory.bytes, rows)

    def read(self, row: int) -> Tree:
        return tree_map(torch.clone, self.layout.read(self.memory.bytes, row * self.layout.size))

    def write(self, row: int, kept: Tree) -> None:
        places = self.layout.places(self.memory.bytes, row * self.layout.size)
        for place, leaf in zip(places, leaves(kept), strict=True):
            place.copy_(leaf)

    def at(self, spot: Spot | None) -> Tree:
        if spot is None:
            return None
        row, strides = spot  # from another process: a list
        return tree_map(torch.clone, self._cotangent.read(self.memory.bytes, row * self.layout.size, strides))

    def write_cotangent(self, row: int, cotangent: Tree) -> list[Strides]:
        """Fill a row; returns how the tensors lie in it."""
        return self._cotangent.write(cotangent, self.memory.bytes, row * self.layout.size)


class Worker:
    """Answers requests, in a process of its own or, to find out what went wrong there, in this one."""

    def __init__(self, experiment: Experiment, states: StateRows, regions: Memory, chunk: int = 0) -> None:
        self.experiment = experiment
        self.chunk = chunk  # clients in a stack; 0: one after the other
        self.states, self.regions = states, regions
        self._replies: dict[str, Layout] = {}
        self._elsewhere: set[str] = set()  # functions whose replies are not what training makes first
        self._tape = 0
        self._graphs: dict[tuple[int, int], Outcome] = {}  # of taped calls, by call and client

    @property
    def peak_memory(self) -> int | None:
        """Bytes of the device that the last request had in use at most."""
        return devices.peak_memory(self.experiment.device)

    def on(self, device: torch.device) -> Worker:
        """The same worker with clients on a device; shared memory is on the host."""
        devices.use(device)
        return Worker(devices.place(self.experiment, device), self.states, self.regions, self.chunk)

    def handle(self, request: dict[str, Any]) -> tuple[list[Any], list[bytes]]:
        """An answer per task, and as bytes what has no place in shared memory."""
        devices.begin_peak(self.experiment.device)
        if request["tape"] != self._tape:
            self._tape, self._graphs = request["tape"], {}
        tasks = [ClientTask(*task) for task in request["tasks"]]
        apart: list[bytes] = []
        do = {"start": self._start, "call": self._call, "pull back": self._pull_back, "evaluate": self._evaluate}
        return do[request["do"]](request, tasks, apart), apart

    def reply_layout(self, function: str) -> Layout:
        if function not in self._replies:
            self._replies[function] = Layout.of(
                reply_example(self.experiment.algorithm, function, self.experiment.model)
            )
        return self._replies[function]

    def message(self, spec: dict[str, Any]) -> Tree:
        """A tree that the server put into memory."""
        tree = Layout.from_json(spec).read(self.regions.bytes, spec["at"], spec["strides"])
        return self._here(tree_map(lambda v: v.data, tree))  # with a version of its own: replies go to the same memory

    def _here(self, tree: Tree) -> Tree:
        """What was read in shared memory, where the clients compute."""
        return to_device(tree, self.experiment.device)

    def _start(self, request: dict[str, Any], tasks: Sequence[ClientTask], apart: list[bytes]) -> list[Any]:
        clients = [task.client for task in tasks]
        if self.chunk:
            with suppress(Exception):  # each for itself will tell what is wrong
                state, buffers = initial(self.experiment, clients, is_stacked=True)
                for i, task in enumerate(tasks):
                    self.states.write(task.target, _row({"state": state, "buffers": buffers}, i))
                return [{}] * len(tasks)
        for task in tasks:
            state, buffers = initial(self.experiment, [task.client], is_stacked=False)
            self.states.write(task.target, {"state": state, "buffers": buffers})
        return [{}] * len(tasks)

    def _call(self, request: dict[str, Any], tasks: Sequence[ClientTask], apart: list[bytes]) -> list[Any]:
        call = self._call_of(request)
        layout = self.reply_layout(call.function)
        if self.chunk and not call.taped:
            places = Layout.of(layout.tree, len(tasks)).places(self.regions.bytes, tasks[0].at)
            if (answers := self._call_stack(call, tasks, layout, places)) is not None:
                return answers
        answers = []
        for task in tasks:
            machine.trim_after_client(self.experiment.model.nbytes)
            rows = len(tasks) if self.chunk else 1
            places = Layout.of(layout.tree, rows).places(self.regions.bytes, task.at)
            mine = [place[task.row] for place in places]
            try:
                # a tape keeps what was made for longer than the place is there
                with output_buffers([] if call.taped else mine):
                    outcome, is_same = self._run(call, task)
                reply = detach(outcome.reply)
                if layout.fits(reply):
                    answers.append({"same": is_same, "strides": put_all(mine, clone_overlapping(leaves(reply), mine))})
                else:  # the server will refuse it, and say why
                    apart.append(codec.encode({}, reply))
                    answers.append({"same": is_same, "apart": True})
            except Exception as error:
                reason = client_error(self.experiment, call, task.client, error)
                answers.append({"error": str(reason), "trace": traceback.format_exc()})
        return answers

    def _call_stack(
        self, call: Call, tasks: Sequence[ClientTask], layout: Layout, places: Sequence[Tensor]
    ) -> list[Any] | None:
        """Clients side by side; None if something is wrong with one of them: each for itself will tell.

        Where memory is out, in halves.
        """
        held = self._here(_stack([self.states.read(task.source) for task in tasks]))
        grads = [self._here(self.states.at(task.grad)) for task in tasks]
        at = [task.position for task in tasks]
        args = tuple(
            tree_map(lambda v: v[at], arg) if own else arg for arg, own in zip(call.args, call.placed, strict=True)
        )
        mine = held["state"], held["buffers"], None if grads[0] is None else _stack(grads)
        wanted = places if call.function not in self._elsewhere else []
        clients = [task.client for task in tasks]
        try:
            with output_buffers(wanted) as buffers:
                outcome = invoke(self.experiment, clients, replace(call, args=args), *mine, is_stacked=True)
            kept = detach({"state": outcome.state, "buffers": outcome.buffers})
            refuse_other(schema(kept, stacked=True), self.states.schema)
            new = changed_leaves(kept, held)
            refuse_infinite(new)
        except Exception as error:
            if not (devices.is_full(error) and len(tasks) > 1):
                return None
            outcome = None
        if outcome is None:  # the error, and what it held of memory, is gone
            del held, grads, mine
            return self._call_in_halves(call, tasks, layout, places)
        reply = detach(outcome.reply)
        is_same = all(v is None for v in new)
        if not layout.fits(_row(reply, 0)):
            return None
        if not is_same:
            for i, task in enumerate(tasks):
                self.states.write(task.target, _row(kept, i))
        in_place = [is_at(v, place) for v, place in zip(leaves(reply), places, strict=True)]
        if wanted and not any(in_place):
            self._elsewhere.add(call.function)
        norms = dict(enumerate(_norms(leaves(reply), buffers.norms).tolist())) if any(in_place) else {}
        strides = self._deliver(leaves(reply), in_place, places, range(len(tasks)))
        return [{"same": is_same, "strides": each, "norm": norms.get(i)} for i, each in enumerate(strides)]

    def _call_in_halves(
        self, call: Call, tasks: Sequence[ClientTask], layout: Layout, places: Sequence[Tensor]
    ) -> list[Any] | None:
        """A stack for which there is no room, as two; the answers say how large the stacks were."""
        devices.empty_cache(self.experiment.device)
        half = (len(tasks) + 1) // 2
        answers: list[Any] = []
        for part in (slice(half), slice(half, None)):
            half_answers = self._call_stack(call, tasks[part], layout, [place[part] for place in places])
            if half_answers is None:
                return None
            answers += [{"chunk": half} | answer for answer in half_answers]
        return answers

    def _deliver(
        self, reply: list[Tensor], in_place: list[bool], places: Sequence[Tensor], at: Sequence[int]
    ) -> Iterator[list[Strides]]:
        """Bring a stacked reply to its places, but for what was made there; tells how the tensors of each row lie."""
        if all(in_place):
            yield from ([] for _ in at)
            return
        shared = self.regions.bytes.untyped_storage().data_ptr()
        # what was made in the place of another must be away before that one comes
        apart = [
            v.clone() if not here and v.untyped_storage().data_ptr() == shared else v
            for v, here in zip(reply, in_place, strict=True)
        ]
        for i, position in enumerate(at):
            each = zip(apart, in_place, places, strict=True)
            strides = [None if here else put(place[position], v[i]) for v, here, place in each]
            yield strides if any(strides) else []

    def _run(self, call: Call, task: ClientTask) -> tuple[Outcome, bool]:
        """One client's call; whether its private state is as it was, else the new one is in its target row."""
        held, outcome = self._invoke(call, task)
        kept = detach({"state": outcome.state, "buffers": outcome.buffers})
        refuse_other(schema(kept), self.states.schema)
        new = changed_leaves(kept, held)
        refuse_infinite(new)
        is_same = all(v is None for v in new)
        if not is_same:
            self.states.write(task.target, kept)
        if call.taped:
            self._graphs[call.number, task.client] = outcome
        return outcome, is_same

    def _invoke(self, call: Call, task: ClientTask) -> tuple[Tree, Outcome]:
        held = self._here(self.states.read(task.source))
        args = tuple(
            tree_map(lambda v: v[[task.position]][0], arg) if own else arg
            for arg, own in zip(call.args, call.placed, strict=True)
        )
        mine = replace(call, args=args)
        grad = self._here(self.states.at(task.grad))
        return held, invoke(
            self.experiment, [task.client], mine, held["state"], held["buffers"], grad, is_stacked=False
        )

    def _pull_back(self, request: dict[str, Any], tasks: Sequence[ClientTask], apart: list[bytes]) -> list[Any]:
        call = self._call_of(request)
        cotangents = self.message(request["cotangent"])
        layout = Layout.from_json(request["back"])
        places = layout.places(self.regions.bytes, request["back"]["at"])
        answers = []
        for task in tasks:
            outcome = self._graphs.pop((call.number, task.client), None) or self._invoke(call, task)[1]
            mine = tree_map(lambda v, task=task: v[[task.back]][0], cotangents)
            state, args = pull_back(outcome, self._here(self.states.at(task.cotangent)), mine)
            lies = self.states.write_cotangent(task.target, state)
            answers.append({"state": lies, "args": _put(places, task.back, args)})
        return answers

    def _evaluate(self, request: dict[str, Any], tasks: Sequence[ClientTask], apart: list[bytes]) -> list[Any]:
        server, splits, round = self.message(request["message"]), request["splits"], request["round"]
        layout = None if request["model"] is None else Layout.from_json(request["model"])
        answers: list[Any] = []
        for task, model, metrics in self._models(tasks, round, server, splits):
            if layout is not None and layout.fits(model):
                answers.append({"metrics": metrics, "strides": layout.write(model, self.regions.bytes, task.at)})
            else:
                apart.append(codec.encode({}, model))
                answers.append({"metrics": metrics, "apart": True})
        return answers

    def _models(
        self, tasks: Sequence[ClientTask], round: int, server: Tree, splits: Sequence[str]
    ) -> Iterator[tuple[ClientTask, Params, Any]]:
        """Personal models and their metrics; of a stack, where its clients can be stacked."""
        groups = [list(tasks)] if self.chunk else [[task] for task in tasks]
        for group in groups:
            try:
                yield from self._models_of(group, round, server, splits, is_stacked=self.chunk > 0)
            except Exception:
                if not self.chunk:
                    raise
                for task in group:
                    yield from self._models_of([task], round, server, splits, is_stacked=False)

    def _models_of(
        self, tasks: Sequence[ClientTask], round: int, server: Tree, splits: Sequence[str], *, is_stacked: bool
    ) -> list[tuple[ClientTask, Params, Any]]:
        held = [self._here(self.states.read(task.source)) for task in tasks]
        mine = _stack(held) if is_stacked else held[0]
        clients = [task.client for task in tasks]
        model = personal(self.experiment, clients, round, mine["state"], mine["buffers"], server, is_stacked=is_stacked)
        by_split = evaluate(self.experiment, clients, model, splits, is_stacked=is_stacked)
        metrics = [{s: {k: v[i].item() for k, v in m.items()} for s, m in by_split.items()} for i in range(len(tasks))]
        models = [_row(model, i) for i in range(len(tasks))] if is_stacked else [model]
        return list(zip(tasks, models, metrics, strict=True))

    def _call_of(self, request: dict[str, Any]) -> Call:
        h = request["call"]
        args = self.message(request["message"])
        return Call(h["function"], h["round"], h["call"], args, tuple(h["placed"]), h["taped"])


def _put(places: Sequence[Tensor], position: int, tree: Tree) -> list[Strides]:
    """Put a tree into its row of a stack."""
    return put_all([place[position] for place in places], tree)


def _norms(reply: Sequence[Tensor], known: Mapping[int, Tensor]) -> Tensor:
    """The norm of the reply of each client of a stack; that of some tensors is known by their address."""
    each = [
        norm
        if (norm := known.get(v.data_ptr())) is not None
        else torch.linalg.vector_norm(v.reshape(len(v), -1), dim=1)
        for v in reply
        if v.is_floating_point()
    ]
    return torch.stack([v.double() for v in each]).square().sum(0).sqrt()


def _stack(trees: Sequence[Tree]) -> Tree:
    return tree_map(lambda *rows: torch.stack(rows), *trees)


def _row(tree: Tree, at: int) -> Tree:
    return tree_map(lambda v: v[at], tree)
