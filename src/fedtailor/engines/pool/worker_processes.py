"""The worker processes of the pool: given work, waited for and replaced when they end; and the life of each of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fedtailor.engines import devices, machine
from fedtailor.engines.devices import CPU
from fedtailor.engines.pool.worker import ClientTask, Worker
from fedtailor.errors import ConfigError
from fedtailor.numerics import solve_log

LIVES = 3  # a client whose worker ends so often is not tried again


class WorkUnit(NamedTuple):
    """What is asked for one client, or for clients in a stack."""

    number: int  # among the units of a request
    tasks: tuple[ClientTask, ...]


class WorkQueue:
    """Units of work that any worker may do, the next one first. A unit is done by one worker, at once."""

    def __init__(self, costs: Sequence[int]) -> None:
        self._costs = costs
        self._units: deque[tuple[WorkUnit, int]] = deque()  # with their costs
        self.left = 0  # the sum of these

    def __bool__(self) -> bool:
        return bool(self._units)

    def add(self, unit: WorkUnit, *, first: bool = False) -> None:
        """To be done last or, if it was tried before, next."""
        cost = sum(self._costs[task.client] for task in unit.tasks)
        (self._units.appendleft if first else self._units.append)((unit, cost))
        self.left += cost

    def portion(self, share: float, most: int, alone: Counter[int]) -> list[WorkUnit]:
        """Units of about that cost, at least one and at most so many; those with clients in `alone` for themselves."""
        portion: list[WorkUnit] = []
        while self._units and len(portion) < max(most, 1):
            unit, cost = self._units[0]
            is_apart = bool(alone) and any(alone[task.client] for task in unit.tasks)
            if portion and (cost > share + 1e-9 * self.left or is_apart):
                break
            self._units.popleft()
            portion.append(unit)
            share -= cost
            self.left -= cost
            if is_apart:
                break
        return portion


@dataclass(eq=False)
class WorkerProcess:
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

    content: Any
    apart: bytes | None
    owner: WorkerProcess | None


class WorkerProcesses:
    """So many processes, forked from this one with `worker` in them.

    For a device that is not the CPU they are spawned, each on a device of its own: see `devices.must_spawn`.
    """

    def __init__(
        self, worker: Worker, count: int, device: torch.device, costs: Sequence[int], *, spawns: bool = False
    ) -> None:
        self.worker, self.device, self._spawns = worker, device, spawns
        self.processes: list[WorkerProcess] = []
        self.peak = 0  # bytes of a device that a worker had in use for one answer, at most
        self._count, self._costs = count, costs
        self._busy: dict[Connection, tuple[WorkerProcess, list[WorkUnit], bytes]] = {}
        weakref.finalize(self, _kill, self.processes, os.getpid())

    def close(self) -> None:
        """End all; they start again when they are needed."""
        self._busy = {}
        _kill(self.processes, os.getpid())

    def work(
        self,
        request: Mapping[str, Any],
        units: Sequence[Sequence[ClientTask]],
        owners: Mapping[int, WorkerProcess] = MappingProxyType({}),
        prepare: Callable[[WorkUnit], WorkUnit] = lambda unit: unit,
        room: Callable[[], int] = lambda: sys.maxsize,
    ) -> Iterator[tuple[WorkUnit, list[Answer]]]:
        """Each unit with the answers to its tasks, in the order in which they are done.

        A unit whose client has an owner goes to it while it lives. The others are handed out in their order as workers
        get free, many at a time in the beginning and single ones in the end, while there is room for what they make.
        """
        head = json.dumps(dict(request)).removesuffix("}").encode()
        self._start_missing()
        own: dict[WorkerProcess, list[WorkUnit]] = {process: [] for process in self.processes}
        queue = WorkQueue(self._costs)
        for unit in (WorkUnit(number, tuple(tasks)) for number, tasks in enumerate(units)):
            owner = owners.get(unit.tasks[0].client)
            if owner in own:
                own[owner].append(unit)
            else:
                queue.add(unit)
        ended: Counter[int] = Counter()
        busy: dict[Connection, tuple[WorkerProcess, list[WorkUnit], bytes]] = {}
        self._busy = busy
        done: list[tuple[WorkUnit, list[Answer]]] = []
        try:
            while True:
                ready: list[tuple[WorkerProcess, bytes]] = []
                for process in self.processes:
                    if process.connection in busy:
                        continue
                    portion = own.pop(process, None) or []
                    if not portion and queue and (room() > 0 or not busy):
                        idle = len(self.processes) - len(busy)
                        share = queue.left / (4 * len(self.processes))
                        # a worker takes all that it is given at a time for one stack
                        most = 1 if self.worker.chunk else room() // idle
                        portion = queue.portion(share, most, ended)
                    if portion:
                        portion = [prepare(unit) for unit in portion]
                        tasks = [task for unit in portion for task in unit.tasks]
                        sent = head + b', "tasks": ' + json.dumps(tasks).encode() + b"}"
                        busy[process.connection] = process, portion, sent
                        ready.append((process, sent))
                for process, sent in ready:  # not before all are made: a worker that wakes up may take this core
                    process.send(sent)
                yield from done
                if busy is not self._busy:
                    raise RuntimeError("the pool has been given other work before this was done")
                done = []
                if not busy:
                    if queue:
                        continue  # what was in the way has been taken away meanwhile
                    return
                for connection in [c for c in wait(list(busy)) if isinstance(c, Connection)]:
                    process, portion, sent = busy[connection]
                    received = process.receive()
                    del busy[connection]
                    answers = None if received is None else self._answers(process, sent, *received)
                    if answers is not None:
                        each = iter(answers)
                        done += [(unit, [next(each) for _ in unit.tasks]) for unit in portion]
                        continue
                    self.processes.remove(process)
                    _kill([process], os.getpid())
                    ended.update(task.client for unit in portion for task in unit.tasks)
                    for unit in [*reversed(portion), *own.pop(process, ())]:
                        if max(ended[task.client] for task in unit.tasks) < LIVES:
                            queue.add(unit, first=True)
                        else:
                            done.append((unit, [Answer(None, None, None)] * len(unit.tasks)))
                self._start_missing()
        finally:
            if busy is self._busy:
                self.stop_unfinished()

    def stop_unfinished(self) -> None:
        """Work that was left before its end: nobody waits for it, and its memory may be given to others."""
        left = [process for process, _, _ in self._busy.values()]
        self._busy = {}
        self.processes[:] = [process for process in self.processes if process not in left]
        _kill(left, os.getpid())

    def _answers(
        self, process: WorkerProcess, sent: bytes, answer: dict[str, Any], apart: Sequence[bytes]
    ) -> list[Answer]:
        if "failed" in answer:  # the same here fails in the same way, but with the error itself
            with one_thread():
                results, apart = self.worker.handle(json.loads(sent))
            return _answers(results, apart, None)
        self.peak = max(self.peak, answer["memory"] or 0)
        solve_log.log_elsewhere(solve_log.Tally(*answer["solves"]))
        return _answers(answer["answers"], apart, process)

    def _start_missing(self) -> None:
        context: Any = multiprocessing.get_context("spawn" if self._spawns else "fork")
        if len(self.processes) < self._count:
            machine.trim()  # else a worker that takes memory which lies free here copies it
        while len(self.processes) < self._count:
            ours, theirs = context.Pipe()
            number = min(set(range(self._count)) - {process.number for process in self.processes})
            process = context.Process(name="fedtailor worker", daemon=True, **self._task(ours, theirs, number))
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the worker ignores it
            try:
                with warnings.catch_warnings():
                    # of threads in this process: a worker has one thread and takes no lock that another may hold
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            except (AttributeError, TypeError, ValueError, pickle.PicklingError) as error:
                raise ConfigError(
                    f'federation.engine = "pool": on {self.device} workers are spawned, and what they need cannot be '
                    f"sent to them ({error}); use vmap or loop"
                ) from None
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                theirs.close()
            self.processes.append(WorkerProcess(process, ours, number))

    def _task(self, ours: Connection, theirs: Connection, number: int) -> dict[str, Any]:
        if not self._spawns:
            others = [ours, *(process.connection for process in self.processes)]
            return {"target": serve, "args": (self.worker, theirs, others, os.getpid(), number)}
        device = self.device
        if device != CPU:
            device = torch.device(device.type, ((device.index or 0) + number) % devices.count(device))
        return {"target": serve_on, "args": (SpawnedWorker(self.worker), theirs, os.getpid(), number, device)}


def _answers(results: Sequence[Any], apart: Sequence[bytes], owner: WorkerProcess | None) -> list[Answer]:
    each = iter(apart)
    return [Answer(one, next(each) if one and one.get("apart") else None, owner) for one in results]


def _kill(processes: list[WorkerProcess], owner: int) -> None:
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


class SpawnedWorker:
    """A worker on its way to a process that is spawned, with functions that no import finds."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __reduce__(self) -> Any:
        import cloudpickle

        return cloudpickle.loads, (cloudpickle.dumps(self.worker),)


def serve_on(worker: Any, connection: Connection, parent: int, number: int, device: torch.device) -> None:
    """The life of a process that was spawned with what was wrapped in `SpawnedWorker`, on a device of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(worker.on(device), connection, (), parent, number)


def serve(worker: Worker, connection: Connection, others: Sequence[Connection], parent: int, number: int) -> None:
    """The life of a worker process: requests until the pool is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interruption is the server's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for other in others:  # else those workers would not see the end of the server
        other.close()
    torch.set_num_threads(1)
    solve_log.forget_watchers()
    home = HomeCore(number)
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    try:
        while True:
            home.stay()
            request = connection.recv_bytes()
            home.leave()
            for part in _answer(worker, request):
                connection.send_bytes(part)
    except (EOFError, OSError):
        return


class HomeCore:
    """Where a worker runs. Workers that wake up at the same time do so on different cores, and push nobody aside, least
    of all the server that has others to wake. Once awake they run wherever the system likes.
    """

    def __init__(self, number: int) -> None:
        self._all: set[int] = set()
        with suppress(OSError, AttributeError):  # not every system has this
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            self._all = os.sched_getaffinity(0)
        self._home = {sorted(self._all)[number % len(self._all)]} if self._all else set()

    def stay(self) -> None:
        self._go(self._home)

    def leave(self) -> None:
        self._go(self._all)

    def _go(self, cores: set[int]) -> None:
        if len(self._all) > 1:
            with suppress(OSError):
                os.sched_setaffinity(0, cores)


def _answer(worker: Worker, request: bytes) -> list[bytes]:
    apart: list[bytes] = []
    try:
        with solve_log.watched() as solves:
            answers, apart = worker.handle(json.loads(request))
        answer: dict[str, Any] = {
            "answers": answers,
            "apart": len(apart),
            "solves": solves.tally,
            "memory": worker.peak_memory,
        }
    except Exception:
        answer = {"failed": traceback.format_exc()}
    sys.stdout.flush()
    return [json.dumps(answer).encode(), *apart]


def _exit_with(parent: int) -> None:
    """The server may be killed while a client trains for long."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
