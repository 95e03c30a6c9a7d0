"""The worker processes of the pool: given work, waited for, and replaced when they end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any

import torch

from fedtailor.engines.books import Queue
from fedtailor.engines.worker import Task, Worker, serve
from fedtailor.local import equilibrium

LIVES = 3  # a client whose worker ends so often is not tried again


@dataclass(eq=False)
class Process:
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
class Answer:
    """What came back for a task; None if worker after worker ended over it."""

    found: Any
    apart: bytes | None
    owner: Process | None


class Crew:
    """So many processes, forked from this one with `worker` in them."""

    def __init__(self, worker: Worker, count: int, costs: Sequence[int]) -> None:
        self.worker = worker
        self.processes: list[Process] = []
        self._count, self._costs = count, costs
        self._busy: dict[Connection, tuple[Process, list[Task], bytes]] = {}
        weakref.finalize(self, _end, self.processes, os.getpid())

    def close(self) -> None:
        """End all; they start again when they are needed."""
        self._busy = {}
        _end(self.processes, os.getpid())

    def work(
        self,
        request: Mapping[str, Any],
        tasks: Sequence[Task],
        owners: Mapping[int, Process] = MappingProxyType({}),
        prepare: Callable[[Task], Task] = lambda task: task,
    ) -> Iterator[tuple[Task, Answer]]:
        """Each task with its answer, in the order in which they are done.

        A task with an owner goes to it while it lives. The others are handed out as workers get free, the most costly
        first, many at a time in the beginning and single ones in the end; stacks are of equal size.
        """
        head = json.dumps(dict(request)).removesuffix("}").encode()
        self._complete()
        own: dict[Process, list[Task]] = {process: [] for process in self.processes}
        queue = Queue(self._costs)
        for task in sorted(tasks, key=lambda task: self._costs[task.client]):
            owner = owners.get(task.client)
            if owner in own:
                own[owner].append(task)
            else:
                queue.add(task)
        even = queue.left / len(self.processes)  # a stack costs time of its own: few, and of equal size
        ended: Counter[int] = Counter()
        self._busy = busy = {}
        done: list[tuple[Task, Answer]] = []
        try:
            while True:
                ready: list[tuple[Process, bytes]] = []
                for process in self.processes:
                    if process.connection in busy:
                        continue
                    share = even if self.worker.chunk else queue.left / (4 * len(self.processes))
                    portion = own.pop(process, None) or queue.portion(share, self.worker.chunk, ended)
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
                    self.processes.remove(process)
                    _end([process], os.getpid())
                    ended.update(task.client for task in portion)
                    for task in [*own.pop(process, ()), *portion]:
                        if ended[task.client] < LIVES:
                            queue.add(task)
                        else:
                            done.append((task, Answer(None, None, None)))
                self._complete()
        finally:
            if busy is self._busy:
                self.settle()

    def settle(self) -> None:
        """Work that was left before its end: nobody waits for it, and its memory may be given to others."""
        left = [process for process, _, _ in self._busy.values()]
        self._busy = {}
        self.processes[:] = [process for process in self.processes if process not in left]
        _end(left, os.getpid())

    def _answers(self, process: Process, sent: bytes, answer: dict[str, Any], apart: Sequence[bytes]) -> list[Answer]:
        """What a worker found."""
        if "failed" in answer:  # the same here fails in the same way, but with the error itself
            with one_thread():
                found, apart = self.worker.handle(json.loads(sent))
            return _answers(found, apart, None)
        equilibrium.tell_watchers(equilibrium.Tally(*answer["solves"]))
        return _answers(answer["answers"], apart, process)

    def _complete(self) -> None:
        """As many workers as there should be."""
        context = multiprocessing.get_context("fork")
        while len(self.processes) < self._count:
            ours, theirs = context.Pipe()
            number = min(set(range(self._count)) - {process.number for process in self.processes})
            others = [ours, *(process.connection for process in self.processes)]
            process = context.Process(
                target=serve,
                args=(self.worker, theirs, others, os.getpid(), number),
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
            self.processes.append(Process(process, ours, number))


def _answers(found: Sequence[Any], apart: Sequence[bytes], owner: Process | None) -> list[Answer]:
    each = iter(apart)
    return [Answer(one, next(each) if one and one.get("apart") else None, owner) for one in found]


def _end(processes: list[Process], owner: int) -> None:
    """End workers and forget them; a forked process has no say in that."""
    if os.getpid() != owner:
        return
    for process in processes:
        process.process.kill()
    for process in processes:
        process.process.join()
        process.connection.close()
    processes.clear()


@contextmanager
def one_thread() -> Iterator[None]:
    """As in a worker: sums over several threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
