"""The life of a worker process: requests until the pool is gone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedtailor.engines.pool.worker import Worker
from fedtailor.numerics import solve_log


class Sent:
    """A worker on its way to a process that is spawned, with functions that no import finds."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __reduce__(self) -> Any:
        import cloudpickle

        return cloudpickle.loads, (cloudpickle.dumps(self.worker),)


def serve_on(worker: Any, connection: Connection, parent: int, number: int, device: torch.device) -> None:
    """The life of a process that was spawned with what was `Sent`, on a device of its own."""
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


def _end_with(parent: int) -> None:
    """The server may be killed while a client trains for long."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
