"""`pool`: worker processes, one per core and of one thread each; what they share lies in shared memory.

A worker reads the private state of a client in one row of that memory and writes the next one into another. The server
notes which row counts, once the answer is there. So a worker can be lost at any moment: its clients are run again, from
the same inputs and to the same bits. To bring back a private state is to note the old row.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.client import Call, initial
from fedtailor.core.me import Setting
from fedtailor.core.placed import outline
from fedtailor.core.states import refuse_other
from fedtailor.core.trees import Params, Tree, leaves, rebuild, schema, tree_map
from fedtailor.engines.books import Queue, Rows
from fedtailor.engines.inprocess import Reply
from fedtailor.engines.shared import Layout, Memory, Region, lying
from fedtailor.engines.worker import Spot, Task, Worker, serve
from fedtailor.errors import ClientError, ConfigError, RoundAbandoned, RunError
from fedtailor.local import equilibrium

LIVES = 3  # a client whose worker ends so often is not tried again


@dataclass(eq=False)
class _Process:
    process: Any
    connection: Connection
    number: int

    def send(self, request: bytes) -> None:
        """That it is no more will be seen when its answer is read."""
        with suppress(OSError):
            self.connection.send_bytes(request)

    def receive(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """An answer, and the bytes that belong to it; None if the worker is no more."""
        try:
            answer = json.loads(self.connection.recv_bytes())
            return answer, [self.connection.recv_bytes() for _ in range(answer.get("apart", 0))]
        except (EOFError, OSError):
            return None


@dataclass(frozen=True)
class _Message:
    """A tree in shared memory, and how a worker finds it."""

    found: dict[str, Any]
    region: Region  # the memory is the message's as long as this is held


@dataclass
class _Taped:
    """A taped call, as it must be known to run it again."""

    call: Call
    message: _Message
    tasks: dict[int, Task]
    owners: dict[int, _Process] = field(default_factory=dict)  # who holds the graph


@dataclass(frozen=True)
class _Answer:
    """What came back for a task; None if worker after worker ended over it."""

    found: Any
    apart: bytes | None
    owner: _Process | None


class Pool:
    """The server's side: hands out clients, most costly first, and puts the replies together in the cohort's order."""

    def __init__(self, setting: Setting, workers: int, chunk: int = 0) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError("federation.engine: pool needs fork, which this system does not have; use loop or vmap")
        self.setting = setting
        self.workers = max(1, min(workers, len(setting.data.clients)))
        self.chunk = chunk  # clients that a worker stacks; 0: one after the other
        self._clients = range(len(setting.data.clients))
        self._costs = (setting.data.train.sizes + 1).tolist()
        self._processes: list[_Process] = []
        self._busy: dict[Connection, tuple[_Process, list[Task], bytes]] = {}
        self._worker: Worker | None = None
        self._where = Rows(len(self._clients))
        self._tape = 0  # workers drop the graphs of another one
        self._taped: dict[int, _Taped] = {}
        self._cotangents: dict[int, Spot] = {}
        self._grads: dict[int, Spot] = {}
        self._model: Layout | None = None  # of a personal model
        weakref.finalize(self, _end, self._processes, os.getpid())

    def start(self) -> None:
        """Give every client its first state."""
        with _one_thread():
            state, buffers = initial(self.setting, [0], is_stacked=False)
        self._open({"state": state, "buffers": buffers})
        for task, answer in self._work({"do": "start"}, [Task(c, target=c) for c in self._clients]):
            if answer.found is None:
                raise RunError(f"first state of client {self._lost(task.client)}")

    def close(self) -> None:
        """End the workers; they start again when they are needed."""
        self._busy = {}
        _end(self._processes, os.getpid())

    def get_states(self) -> Tree:
        """Everything private, stacked in the order of clients; a copy."""
        kept = self._inside.kept
        stacks, now = kept.all_places(self._inside.rows.bytes, self._where.used), torch.tensor(self._where.now)
        return rebuild(kept.tree, (stack[now] for stack in stacks))

    def set_states(self, rows: Tree) -> None:
        """Put saved states back."""
        if self._worker is None:
            self._open(tree_map(lambda v: v[0].clone(), rows))
        kept = self._inside.kept
        refuse_other(schema(rows, stacked=True), schema(kept.tree))
        self._settle()
        self._forget()
        self._where = Rows(len(self._clients))
        for place, leaf in zip(kept.all_places(self._inside.rows.bytes, len(self._clients)), leaves(rows), strict=True):
            place.copy_(leaf)

    def begin_round(self, round: int) -> dict[int, str]:
        """Forget tapes and gradients; what is written from here on can be undone. Nobody is ever away here."""
        self._forget()
        return {}

    def end_round(self, clients: Sequence[int]) -> dict[int, str]:
        """Nothing is ever lost here."""
        return {}

    def saved(self, states: Sequence[Tree]) -> None:
        """Everything is here as long as the process is."""

    def _forget(self) -> None:
        self._where.drop([spot[0] for spots in (self._cotangents, self._grads) for spot in spots.values()])
        self._cotangents, self._grads = {}, {}
        self._forget_tape()
        self._where.begin()

    def finish_backward(self) -> None:
        """The tape is read back: what has reached the private states is now `me.grad`."""
        self._where.drop([spot[0] for spot in self._grads.values()])
        self._grads, self._cotangents = self._cotangents, {}
        self._forget_tape()

    def _forget_tape(self) -> None:
        self._taped = {}
        self._tape += 1
        self._where.forget_tape()

    def undo(self, clients: Sequence[int] | None = None) -> None:
        """Bring back the private states before this round, of all or of some clients."""
        self._where.undo(list(self._where.before) if clients is None else clients)

    def together(self, clients: Sequence[int]) -> Tree | None:
        """Clients are not in one process here."""
        return None

    def keep_together(self, clients: Sequence[int], state: Tree, held: Tree) -> None:
        """Never asked for."""
        raise NotImplementedError

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        """Run a call at every client; the replies come in the order of `clients`."""
        inside, where = self._inside, self._where
        message = self._put(call.args)
        layout = Layout.of(inside.reply_layout(call.function).tree, len(clients))
        region = inside.regions.take(layout.size)
        tasks = [Task(c, i, where.now[c], where.fresh(), self._grads.get(c)) for i, c in enumerate(clients)]
        taped = _Taped(call, message, {task.client: task for task in tasks})
        if call.taped:
            self._taped[call.number] = taped
        request = {"do": "call", "call": call.header, "message": message.found, "rows": len(tasks), "reply": region.at}
        answers: dict[int, _Answer] = {}
        unused = {task.target for task in tasks}
        try:
            for task, answer in self._work(request, tasks):
                answers[task.client] = answer
                if answer.owner is not None:
                    taped.owners[task.client] = answer.owner
                if answer.found is not None and "error" not in answer.found and not answer.found["same"]:
                    where.move(task.client, task.target, taping=bool(self._taped))
                    unused.remove(task.target)
        finally:
            where.drop(list(unused))
        places = layout.places(region.bytes)
        for first, last, usual in _spans([_is_usual(answers[c]) for c in clients]):
            if usual:
                norms = [answers[c].found.get("norm") for c in clients[first:last]]
                stack = rebuild(layout.tree, (p[first:last] for p in places))
                yield Reply(tuple(clients[first:last]), stack, norms=None if None in norms else norms)
                continue
            for at in range(first, last):
                yield self._reply(call, clients[at], answers[clients[at]], layout.tree, [p[at] for p in places])

    def exchange(self, requests: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | OSError]]:
        """Never asked for: clients on one machine have nothing to hide from it."""
        raise NotImplementedError

    def _reply(self, call: Call, client: int, answer: _Answer, tree: Tree, places: Sequence[Tensor]) -> Reply:
        """Of a client that failed, or whose reply does not lie as declared."""
        if answer.found is None:
            name = type(self.setting.algorithm).__name__
            lost = f"{name}.{call.function}, round {call.round}, client {self._lost(client)}"
            return Reply((client,), error=ClientError(lost))
        if "error" in answer.found:
            error = ClientError(answer.found["error"])
            error.add_note(answer.found["trace"])
            return Reply((client,), error=error)
        if answer.apart is not None:
            reply = codec.decode(answer.apart)[1]
        else:
            reply = rebuild(tree, iter(lying(places, answer.found["strides"])))
        return Reply((client,), tree_map(lambda v: v[None], reply))

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        """Cotangents of a taped call's arguments, client by client; who ran one has what is needed to go back."""
        inside, where, taped = self._inside, self._where, self._taped.pop(number)
        call, position = taped.call, {c: i for i, c in enumerate(clients)}
        down = self._put(cotangent)
        layout = Layout.of(outline(call.args, call.placed), len(clients))
        region = inside.regions.take(layout.size)
        tasks = [
            task._replace(target=where.fresh(), cotangent=self._cotangents.get(c), back=position[c])
            for c, task in taped.tasks.items()
        ]
        request = {
            "do": "pull back",
            "call": call.header,
            "message": taped.message.found,
            "cotangent": down.found,
            "back": layout.json() | {"at": region.at},
        }
        answers: dict[int, _Answer] = {}
        unused = {task.target for task in tasks}
        try:
            for task, answer in self._work(request, tasks, taped.owners):
                if answer.found is None:
                    raise RoundAbandoned(
                        f"round {call.round}: on the way back of {call.function}, client {self._lost(task.client)}"
                    )
                answers[task.client] = answer
                if task.cotangent is not None:
                    where.drop([task.cotangent[0]])
                self._cotangents[task.client] = task.target, answer.found["state"]
                unused.remove(task.target)
        finally:
            where.drop(list(unused))
        places = layout.places(region.bytes)
        for c in taped.tasks:
            mine = lying([p[position[c]] for p in places], answers[c].found["args"])
            args = zip(rebuild(layout.tree, iter(mine)), call.placed, strict=True)
            yield (c,), tuple(tree_map(lambda v: v[None], arg) if own else arg for arg, own in args)

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[tuple[tuple[int, ...], dict[str, dict[str, Tensor]], Params]]:
        """Metrics of the personal models, and the models, client by client as they are done."""
        message = self._put(server)
        request = {"do": "evaluate", "message": message.found, "round": round, "splits": list(splits)}
        tasks = [Task(c, source=self._where.now[c]) for c in clients]
        first = 1 if self._model is None else 0  # tells how a personal model looks
        for some in (tasks[:first], tasks[first:]):
            yield from self._evaluated(request, some)

    def _evaluated(
        self, request: dict[str, Any], tasks: list[Task]
    ) -> Iterator[tuple[tuple[int, ...], dict[str, dict[str, Tensor]], Params]]:
        layout, regions = self._model, self._inside.regions
        places: dict[int, Region] = {}

        def with_place(task: Task) -> Task:
            """Only when it is handed out: the models of all clients may be more than fits."""
            if layout is None:
                return task
            places[task.client] = regions.take(layout.size)
            return task._replace(at=places[task.client].at)

        request = request | {"model": None if layout is None else layout.json()}
        for task, answer in self._work(request, tasks, prepare=with_place):
            place = places.pop(task.client, None)
            if answer.found is None:
                raise RunError(f"evaluation of client {self._lost(task.client)}")
            if answer.apart is not None:
                model = codec.decode(answer.apart)[1]
                self._model = self._model or Layout.of(model)
            else:
                assert layout is not None
                assert place is not None
                model = layout.read(place.bytes, strides=answer.found["strides"])
            metrics = {
                split: {k: torch.tensor([v], dtype=torch.float64) for k, v in found.items()}
                for split, found in answer.found["metrics"].items()
            }
            yield (task.client,), metrics, tree_map(lambda v: v[None], model)

    def _lost(self, client: int) -> str:
        return f"{self.setting.data.clients[client]}: its worker process ended, {LIVES} times"

    @property
    def _inside(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the clients have no states yet: start the engine first")
        return self._worker

    def _open(self, example: Tree) -> None:
        """Memory for states like `example`; it must be there before the workers are."""
        self.close()
        kept = Layout.of(example)
        self._where = Rows(len(self._clients))
        self._worker = Worker(self.setting, Memory(4 * len(self._clients) * kept.size), Memory(), kept, self.chunk)

    def _put(self, tree: Tree) -> _Message:
        self._settle()
        layout = Layout.of(tree)
        region = self._inside.regions.take(layout.size)
        return _Message(layout.json() | {"at": region.at, "strides": layout.write(tree, region.bytes)}, region)

    def _work(
        self,
        request: Mapping[str, Any],
        tasks: Sequence[Task],
        owners: Mapping[int, _Process] = MappingProxyType({}),
        prepare: Callable[[Task], Task] = lambda task: task,
    ) -> Iterator[tuple[Task, _Answer]]:
        """Each task with its answer, in the order in which they are done.

        A task with an owner goes to it while it lives. The others are handed out as workers get free, the most costly
        first, many at a time in the beginning and single ones in the end; stacks are of equal size.
        """
        head = json.dumps(dict(request) | {"tape": self._tape}).removesuffix("}").encode()
        self._complete()
        own: dict[_Process, list[Task]] = {process: [] for process in self._processes}
        queue = Queue(self._costs)
        for task in sorted(tasks, key=lambda task: self._costs[task.client]):
            owner = owners.get(task.client)
            if owner in own:
                own[owner].append(task)
            else:
                queue.add(task)
        even = queue.left / len(self._processes)  # a stack costs time of its own: few, and of equal size
        ended: Counter[int] = Counter()
        self._busy = busy = {}
        done: list[tuple[Task, _Answer]] = []
        try:
            while True:
                ready: list[tuple[_Process, bytes]] = []
                for process in self._processes:
                    if process.connection in busy:
                        continue
                    share = even if self.chunk else queue.left / (4 * len(self._processes))
                    portion = own.pop(process, None) or queue.portion(share, self.chunk, ended)
                    if portion:
                        sent = head + b', "tasks": ' + json.dumps([prepare(task) for task in portion]).encode() + b"}"
                        busy[process.connection] = process, portion, sent
                        ready.append((process, sent))
                for process, sent in ready:  # not before all are made: a worker that wakes up may take this core
                    process.send(sent)
                yield from done
                if busy is not self._busy:
                    raise RuntimeError("the pool has been given other work before this was done")
                if not busy:
                    return
                done = []
                for connection in [c for c in wait(list(busy)) if isinstance(c, Connection)]:
                    process, portion, sent = busy[connection]
                    received = process.receive()
                    del busy[connection]
                    answers = None if received is None else self._answers(process, sent, *received)
                    if answers is not None:
                        done += zip(portion, answers, strict=True)
                        continue
                    self._processes.remove(process)
                    _end([process], os.getpid())
                    ended.update(task.client for task in portion)
                    for task in [*own.pop(process, ()), *portion]:
                        if ended[task.client] < LIVES:
                            queue.add(task)
                        else:
                            done.append((task, _Answer(None, None, None)))
                self._complete()
        finally:
            if busy is self._busy:
                self._settle()

    def _settle(self) -> None:
        """Work that was left before its end: nobody waits for it, and its memory may be given to others."""
        left = [process for process, _, _ in self._busy.values()]
        self._busy = {}
        self._processes[:] = [process for process in self._processes if process not in left]
        _end(left, os.getpid())

    def _answers(self, process: _Process, sent: bytes, answer: dict[str, Any], apart: Sequence[bytes]) -> list[_Answer]:
        """What a worker found."""
        if "failed" in answer:  # the same here fails in the same way, but with the error itself
            with _one_thread():
                found, apart = self._inside.handle(json.loads(sent))
            return _answers(found, apart, None)
        equilibrium.tell_watchers(equilibrium.Tally(*answer["solves"]))
        return _answers(answer["answers"], apart, process)

    def _complete(self) -> None:
        """As many workers as there should be."""
        context = multiprocessing.get_context("fork")
        while len(self._processes) < self.workers:
            ours, theirs = context.Pipe()
            number = min(set(range(self.workers)) - {process.number for process in self._processes})
            others = [ours, *(process.connection for process in self._processes)]
            process = context.Process(
                target=serve,
                args=(self._inside, theirs, others, os.getpid(), number),
                name="fedtailor worker",
                daemon=True,
            )
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the worker ignores it
            try:
                with warnings.catch_warnings():
                    # of threads in this process: a worker has one thread and takes no lock that another may hold
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                theirs.close()
            self._processes.append(_Process(process, ours, number))


def _answers(found: Sequence[Any], apart: Sequence[bytes], owner: _Process | None) -> list[_Answer]:
    each = iter(apart)
    return [_Answer(one, next(each) if one and one.get("apart") else None, owner) for one in found]


def _end(processes: list[_Process], owner: int) -> None:
    """End workers and forget them; a forked process has no say in that."""
    if os.getpid() != owner:
        return
    for process in processes:
        process.process.kill()
    for process in processes:
        process.process.join()
        process.connection.close()
    processes.clear()


def _is_usual(answer: _Answer) -> bool:
    """Whether a reply lies as it was declared."""
    return answer.found is not None and not any(answer.found.get("strides", (True,)))


def _spans(kinds: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """First and last + 1 of each stretch of equal values, and the value."""
    first = 0
    for last in range(1, len(kinds) + 1):
        if last == len(kinds) or kinds[last] != kinds[first]:
            yield first, last, kinds[first]
            first = last


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a worker: sums over several threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
