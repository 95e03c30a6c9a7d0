"""`pool`: worker processes, one per core and of one thread each; what they share lies in shared memory.

A worker reads the private state of a client in one row of that memory and writes the next one into another. The server
notes which row counts, once the answer is there. So a worker can be lost at any moment: its clients are run again, from
the same inputs and to the same bits. To bring back a private state is to note the old row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.client import Call, initial
from fedtailor.core.engine import Evaluated, Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.reduce import outline
from fedtailor.core.trees import Tree, leaves, rebuild, schema, tree_map
from fedtailor.engines import devices, machine
from fedtailor.engines.devices import CPU
from fedtailor.engines.inprocess import group_clients
from fedtailor.engines.pool.shared_memory import Layout, Memory, Region, tensors_in
from fedtailor.engines.pool.worker import ClientTask, Spot, StateRows, Worker
from fedtailor.engines.pool.worker_processes import LIVES, Answer, WorkerProcess, WorkerProcesses, WorkUnit, one_thread
from fedtailor.engines.states import refuse_other
from fedtailor.errors import ClientError, ConfigError, RoundAbandoned, RunError

WAITING = 2**26  # bytes of replies that may wait for those before them


class RowBook:
    """Which row of memory holds what. Rows are free again when nothing can ask for them any more."""

    def __init__(self, clients: int) -> None:
        self.now = list(range(clients))  # row of the private state of each client
        self.before: dict[int, int] = {}  # where that was when the round began, if it is another
        self.used = clients
        self._free: list[int] = []
        self._held: list[int] = []  # of former calls of a tape

    def fresh(self) -> int:
        if self._free:
            return self._free.pop()
        self.used += 1
        return self.used - 1

    def drop(self, rows: Sequence[int]) -> None:
        """Nobody reads these any more."""
        self._free += rows

    def move(self, client: int, to: int, *, taping: bool) -> None:
        """The private state of a client is in another row from now on."""
        old, self.now[client] = self.now[client], to
        if client not in self.before:
            self.before[client] = old
        else:
            (self._held if taping else self._free).append(old)

    def undo(self, clients: Sequence[int]) -> None:
        """Back to the rows when the round began."""
        for client in clients:
            if client in self.before:
                self._held.append(self.now[client])
                self.now[client] = self.before.pop(client)

    def forget_tape(self) -> None:
        """Nothing will be run again."""
        self._free += self._held
        self._held = []

    def begin(self) -> None:
        """What is there now is what undo brings back."""
        self._free += self.before.values()
        self.before = {}
        self.forget_tape()


@dataclass(frozen=True)
class PlacedTree:
    """A tree in shared memory, and how a worker finds it."""

    content: dict[str, Any]
    region: Region  # the memory is the message's as long as this is held


@dataclass
class TapedCall:
    """A taped call, as it must be known to run it again."""

    call: Call
    message: PlacedTree
    tasks: dict[int, ClientTask]
    owners: dict[int, WorkerProcess] = field(default_factory=dict)  # who holds the graph


class Pool:
    """The server's side: hands out clients, most costly first, and puts the replies together in the cohort's order."""

    def __init__(self, experiment: Experiment, workers: int, chunk: int = 0) -> None:
        if not machine.can_fork():
            why = "pool needs fork, which this system does not have; use loop or vmap"
            raise ConfigError(f"federation.engine: {why}", code="config.system")
        self.experiment = experiment.on(CPU)  # what is shared is on the host
        self._clients = range(len(experiment.data.clients))
        self._device = experiment.device
        self.workers = max(1, min(workers, len(self._clients)))  # processes
        self.chunk = chunk  # clients that a worker stacks; 0: one after the other
        self._processes: WorkerProcesses | None = None
        self._where = RowBook(len(self._clients))
        self._tape = 0  # workers drop the graphs of another one
        self._taped: dict[int, TapedCall] = {}
        self._cotangents: dict[int, Spot] = {}
        self._grads: dict[int, Spot] = {}
        self._model: Layout | None = None  # of a personal model

    @property
    def peak_memory(self) -> int | None:
        """The most bytes of a device that a worker had in use in this round, where devices tell."""
        return self._workers.peak or None

    def start(self) -> None:
        with one_thread():
            state, buffers = initial(self.experiment, [0], is_stacked=False)
        self._start_workers({"state": state, "buffers": buffers})
        units = [[ClientTask(c, target=c) for c in group] for group in self._groups(self._clients)]
        for unit, answers in self._run_units({"do": "start"}, units):
            if any(answer.content is None for answer in answers):
                raise RunError(f"first state of client {self._why_lost(unit.tasks[0].client)}")

    def close(self) -> None:
        """End the workers; they start again when they are needed."""
        if self._processes is not None:
            self._processes.close()

    def get_states(self) -> Tree:
        """Everything private, stacked in the order of clients; a copy."""
        states, now = self._inside.states, torch.tensor(self._where.now, device="cpu")
        return rebuild(states.layout.tree, (stack[now] for stack in states.stacks(self._where.used)))

    def set_states(self, rows: Tree) -> None:
        if self._processes is None:
            self._start_workers(tree_map(lambda v: v[0].clone(), rows))
        states = self._inside.states
        refuse_other(schema(rows, stacked=True), states.schema)
        self._workers.stop_unfinished()
        self._forget()
        self._where = RowBook(len(self._clients))
        for place, leaf in zip(states.stacks(len(self._clients)), leaves(rows), strict=True):
            place.copy_(leaf)

    def begin_round(self, round: int) -> dict[int, str]:
        """Forget tapes and gradients; what is written from here on can be undone. Nobody is ever away here."""
        self._forget()
        self._workers.peak = 0
        return {}

    def _forget(self) -> None:
        self._where.drop([spot.row for spots in (self._cotangents, self._grads) for spot in spots.values()])
        self._cotangents, self._grads = {}, {}
        self._forget_tape()
        self._where.begin()

    def finish_backward(self) -> None:
        self._where.drop([spot.row for spot in self._grads.values()])
        self._grads, self._cotangents = self._cotangents, {}
        self._forget_tape()

    def _forget_tape(self) -> None:
        self._taped = {}
        self._tape += 1
        self._where.forget_tape()

    def undo(self, clients: Sequence[int] | None = None) -> None:
        self._where.undo(list(self._where.before) if clients is None else clients)

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """Run a call at every client; the replies come in the order of `clients`, of stacks stack by stack."""
        message = self._share(call.args)
        taped = TapedCall(call, message, {})
        if call.taped:
            self._taped[call.number] = taped
        groups = [(c,) for c in clients] if call.taped else self._groups(clients)
        position = {c: i for i, c in enumerate(clients)}
        ended: list[int] = []  # of stacks over which worker after worker ended: one of them may be to blame
        for group, answers, places in self._call_groups(taped, groups, position):
            if len(group) > 1 and answers[0].content is None:
                ended += group
                continue
            yield from self._replies(call, group, answers, places)
            del places  # their memory is for the next
        for group, answers, places in self._call_groups(taped, [(c,) for c in ended], position):
            yield from self._replies(call, group, answers, places)

    def _groups(self, clients: Sequence[int]) -> list[tuple[int, ...]]:
        """Clients that a worker runs together; by what they are, not by how many workers there are."""
        return list(group_clients(self.experiment, clients, self.chunk)) if self.chunk else [(c,) for c in clients]

    def _call_groups(
        self, taped: TapedCall, groups: Sequence[tuple[int, ...]], position: dict[int, int]
    ) -> Iterator[tuple[tuple[int, ...], list[Answer], list[Tensor]]]:
        """The answers of each group, in their order, and where its replies lie; some wait for those before them."""
        if not groups:
            return
        inside, where, call = self._inside, self._where, taped.call
        one = inside.reply_layout(call.function)
        units = [[self._task(c, position[c], row) for row, c in enumerate(group)] for group in groups]
        taped.tasks.update((task.client, task) for unit in units for task in unit)
        window = max(self.workers + 1, WAITING // (one.size * max(map(len, groups))))
        regions: dict[int, Region] = {}
        waiting: dict[int, list[Answer]] = {}

        def prepare(unit: WorkUnit) -> WorkUnit:
            if unit.number not in regions:  # else it is tried again
                size = Layout.of(one.tree, len(unit.tasks)).size
                regions[unit.number] = inside.regions.take(size)
            return unit._replace(tasks=tuple(task._replace(at=regions[unit.number].at) for task in unit.tasks))

        unused = {task.target for unit in units for task in unit}
        request = {"do": "call", "call": call.header, "message": taped.message.content}
        options: dict[str, Any] = {"prepare": prepare, "room": lambda: window - len(regions)}
        try:
            due = 0
            for unit, answers in self._run_units(request, units, **options):
                for task, answer in zip(unit.tasks, answers, strict=True):
                    if answer.owner is not None:
                        taped.owners[task.client] = answer.owner
                    self.chunk = min(self.chunk, (answer.content or {}).get("chunk", self.chunk))
                    if answer.content is not None and "error" not in answer.content and not answer.content["same"]:
                        where.move(task.client, task.target, taping=bool(self._taped))
                        unused.remove(task.target)
                waiting[unit.number] = answers
                while due in waiting:
                    group = groups[due]
                    places = Layout.of(one.tree, len(group)).places(regions[due].bytes)
                    yield group, waiting.pop(due), places
                    del places, regions[due]
                    due += 1
        finally:
            where.drop(list(unused))

    def _task(self, client: int, position: int, row: int) -> ClientTask:
        where = self._where
        return ClientTask(client, position, where.now[client], where.fresh(), self._grads.get(client), row=row)

    def _replies(
        self, call: Call, group: tuple[int, ...], answers: Sequence[Answer], places: Sequence[Tensor]
    ) -> Iterator[Reply]:
        tree = self._inside.reply_layout(call.function).tree
        if len(group) > 1 and all(map(_is_usual, answers)):
            norms = [answer.content.get("norm") for answer in answers]
            yield Reply(group, rebuild(tree, iter(places)), norms=None if None in norms else norms)
            return
        for row, (client, answer) in enumerate(zip(group, answers, strict=True)):
            yield self._reply(call, client, answer, tree, [p[row] for p in places])

    def _reply(self, call: Call, client: int, answer: Answer, tree: Tree, places: Sequence[Tensor]) -> Reply:
        """Of a client that failed, or whose reply does not lie as declared."""
        if answer.content is None:
            name = type(self.experiment.algorithm).__name__
            lost = f"{name}.{call.function}, round {call.round}, client {self._why_lost(client)}"
            return Reply((client,), error=ClientError(lost))
        if "error" in answer.content:
            error = ClientError(answer.content["error"])
            error.add_note(answer.content["trace"])
            return Reply((client,), error=error)
        if answer.apart is not None:
            reply = codec.decode(answer.apart, sys.maxsize)[1]
        else:
            reply = rebuild(tree, iter(tensors_in(places, answer.content["strides"])))
        return Reply((client,), tree_map(lambda v: v[None], reply))

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        """Cotangents of a taped call's arguments, client by client; who ran one has what is needed to go back."""
        inside, where, taped = self._inside, self._where, self._taped.pop(number)
        call, position = taped.call, {c: i for i, c in enumerate(clients)}
        down = self._share(cotangent)
        layout = Layout.of(outline(call.args, call.placed), len(clients))
        region = inside.regions.take(layout.size)
        tasks = [
            task._replace(target=where.fresh(), cotangent=self._cotangents.get(c), back=position[c])
            for c, task in taped.tasks.items()
        ]
        request = {
            "do": "pull back",
            "call": call.header,
            "message": taped.message.content,
            "cotangent": down.content,
            "back": layout.json() | {"at": region.at},
        }
        answers: dict[int, Answer] = {}
        unused = {task.target for task in tasks}
        try:
            for unit, (answer,) in self._run_units(request, [[task] for task in tasks], owners=taped.owners):
                (task,) = unit.tasks
                if answer.content is None:
                    raise RoundAbandoned(
                        f"round {call.round}: on the way back of {call.function}, client {self._why_lost(task.client)}"
                    )
                answers[task.client] = answer
                if task.cotangent is not None:
                    where.drop([task.cotangent.row])
                self._cotangents[task.client] = Spot(task.target, answer.content["state"])
                unused.remove(task.target)
        finally:
            where.drop(list(unused))
        places = layout.places(region.bytes)
        for c in taped.tasks:
            mine = tensors_in([p[position[c]] for p in places], answers[c].content["args"])
            args = zip(rebuild(layout.tree, iter(mine)), call.placed, strict=True)
            yield (c,), tuple(tree_map(lambda v: v[None], arg) if own else arg for arg, own in args)

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[Evaluated]:
        """Metrics of the personal models, and the models, client by client as they are done."""
        message = self._share(server)
        request = {"do": "evaluate", "message": message.content, "round": round, "splits": list(splits)}
        units = [[ClientTask(c, source=self._where.now[c]) for c in group] for group in self._groups(clients)]
        first = 1 if self._model is None else 0  # tells how a personal model looks
        for some in (units[:first], units[first:]):
            yield from self._evaluate_units(request, some)

    def _evaluate_units(self, request: dict[str, Any], units: Sequence[Sequence[ClientTask]]) -> Iterator[Evaluated]:
        layout, regions = self._model, self._inside.regions
        places: dict[int, Region] = {}

        def with_places(unit: WorkUnit) -> WorkUnit:
            """Only when it is handed out: the models of all clients may be more than fits."""
            if layout is None:
                return unit
            places.update({task.client: regions.take(layout.size) for task in unit.tasks})
            return unit._replace(tasks=tuple(task._replace(at=places[task.client].at) for task in unit.tasks))

        request = request | {"model": None if layout is None else layout.json()}
        for unit, answers in self._run_units(request, units, prepare=with_places):
            for task, answer in zip(unit.tasks, answers, strict=True):
                place = places.pop(task.client, None)
                if answer.content is None:
                    raise RunError(f"evaluation of client {self._why_lost(task.client)}")
                if answer.apart is not None:
                    model = codec.decode(answer.apart, sys.maxsize)[1]
                    self._model = self._model or Layout.of(model)
                else:
                    assert layout is not None
                    assert place is not None
                    model = layout.read(place.bytes, strides=answer.content["strides"])
                metrics = {
                    split: {k: torch.tensor([v], dtype=torch.float64, device="cpu") for k, v in values.items()}
                    for split, values in answer.content["metrics"].items()
                }
                yield (task.client,), metrics, tree_map(lambda v: v[None], model)

    def _why_lost(self, client: int) -> str:
        return f"{self.experiment.data.clients[client]}: its worker process ended, {LIVES} times"

    @property
    def _workers(self) -> WorkerProcesses:
        if self._processes is None:
            raise RuntimeError("the clients have no states yet: start the engine first")
        return self._processes

    @property
    def _inside(self) -> Worker:
        """What the workers were forked with, in this process."""
        return self._workers.worker

    def _start_workers(self, example: Tree) -> None:
        """Memory for states like `example`; it must be there before the workers are."""
        self.close()
        layout = Layout.of(example)
        self._where = RowBook(len(self._clients))
        is_sent = devices.must_spawn(self._device)
        states = StateRows(Memory(4 * len(self._clients) * layout.size, is_sent=is_sent), layout)
        worker = Worker(self.experiment, states, Memory(is_sent=is_sent), self.chunk)
        costs = (self.experiment.data.train.sizes + 1).tolist()
        self._processes = WorkerProcesses(worker, self.workers, self._device, costs, spawns=is_sent)

    def _share(self, tree: Tree) -> PlacedTree:
        self._workers.stop_unfinished()
        layout = Layout.of(tree)
        region = self._inside.regions.take(layout.size)
        return PlacedTree(layout.json() | {"at": region.at, "strides": layout.write(tree, region.bytes)}, region)

    def _run_units(
        self, request: dict[str, Any], units: Sequence[Sequence[ClientTask]], **options: Any
    ) -> Iterator[tuple[WorkUnit, list[Answer]]]:
        return self._workers.work(request | {"tape": self._tape}, units, **options)


def _is_usual(answer: Answer) -> bool:
    """Whether a reply lies as it was declared."""
    return answer.content is not None and not any(answer.content.get("strides", (True,)))
