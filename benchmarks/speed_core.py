"""What every measurement of speed needs: tasks for our side, rivals that take turns, and a figure for the table."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from benchmarks.speed_limits import Workers
from benchmarks.speed_tasks import CLASSES, LR, SHAPE, Task, noise
from fedtailor import engines
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.data.download import data_root
from fedtailor.data.sources.images import DIGITS, mnist
from fedtailor.engines import EngineName, machine
from fedtailor.engines.inprocess import InProcess
from fedtailor.models import build
from fedtailor.training.solver import Solver

Rivals = Mapping[str, Callable[[], None]]
LAYOUTS = ("contiguous", "channels_last")
KEPT, PLAIN = ", freed memory kept", f"plain torch, {engines.cores()} processes,"


def processor_seconds() -> float:
    """Of this process and those that it has started."""
    here = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (here, *here.children(recursive=True)))


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": processor_seconds}


@dataclass(frozen=True)
class Figure:
    """One line of the table; `unit` is s (seconds) or gb."""

    workload: str
    ours: float
    limit: float
    against: str
    goal: float | None = None
    unit: str = "s"
    clients: int | None = None  # of a series that grows
    engine: str | None = None  # what ours ran on

    @property
    def ratio(self) -> float:
        return self.ours / self.limit

    def row(self) -> dict[str, Any]:
        """As it stands in the file: ours_s, limit_s and ratio, or the same in gb."""
        rest = {k: v for k, v in asdict(self).items() if k not in ("ours", "limit", "unit") and v is not None}
        return {f"ours_{self.unit}": self.ours, f"limit_{self.unit}": self.limit, "ratio": self.ratio} | rest


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    workers: Workers  # memory as the C library gives it
    keeping: Workers  # freed memory kept for the next step
    alone: Workers
    engine: EngineName = "auto"
    repeats: int = 5
    small: bool = False
    clock: str = "wall"


def images(count: int) -> tuple[Tensor, Tensor]:
    """MNIST if its folder is given, otherwise noise."""
    if not os.environ.get("FEDTAILOR_DATA"):
        return noise(count)
    return mnist(data_root(), "MNIST", "mnist", "train", DIGITS).convert(np.arange(count))


def dealt(parts: list[np.ndarray[Any, Any]], x: Tensor, y: Tensor) -> FederatedData:
    """Clients with the given rows, and one row each to validate and to test."""

    def rows(each: list[np.ndarray[Any, Any]]) -> Rows:
        at = torch.from_numpy(np.concatenate(each))
        return Rows(x[at], y[at], torch.tensor([0, *map(len, each)]).cumsum(0))

    one = rows([part[:1] for part in parts])
    names = tuple(f"c{i}" for i in range(len(parts)))
    return FederatedData("images", "classification", names, rows(parts), one, one, CLASSES)


def setting(workload: str, task: Task, algorithm: Algorithm) -> Experiment:
    """Workload A or B."""
    data = dealt(np.split(np.arange(task.clients * task.samples), task.clients), *images(task.clients * task.samples))
    model = (
        build("cnn", SHAPE, CLASSES, seed=0)
        if workload == "A"
        else build("mlp", SHAPE, CLASSES, seed=0, options={"hidden": (200,)})
    )
    return Experiment(algorithm, model, data, Solver(lr=LR, batch_size=task.batch), 0)


def on_threads(count: int, run: Callable[[], None]) -> Callable[[], None]:
    """The same on so many threads of torch."""

    def wrapped() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        run()
        torch.set_num_threads(before)

    return wrapped


class Ours:
    """Rounds of the federation, each with clients drawn anew."""

    def __init__(
        self, setting: Experiment, engine: EngineName, cohort: int = 0, workers: int = 0, threads: int = 0
    ) -> None:
        self._held = ExitStack()
        self._held.enter_context(machine.freed_memory_kept())  # as a run has it
        name = engines.choose(setting, cohort).name if engine == "auto" else engine
        self.engine = engines.make(name, setting, workers=workers or engines.cores(), cohort=cohort)
        self.engine.start()
        self.run_on_threads = on_threads(threads or 1, self._run)
        self.federation = Federation(self.engine)
        self.server = setting.algorithm.server_init(setting.model)
        self.cohort, self.round = cohort or len(setting.data.clients), 0

    def __call__(self) -> None:
        self.run_on_threads()

    def _run(self) -> None:
        self.round += 1
        clients = len(self.engine.experiment.data.clients)
        drawn = stream(0, self.round, "cohort").choice(clients, size=self.cohort, replace=False)
        self.server = self.federation.run_round(self.round, sorted(drawn.tolist()), self.server)

    @property
    def engine_name(self) -> str:
        """What "auto" has chosen."""
        stacks = bool(getattr(self.engine, "chunk", 0))
        if isinstance(self.engine, InProcess):
            return "vmap" if stacks else "loop"
        return "vmap on several processes" if stacks else type(self.engine).__name__.lower()

    def close(self) -> None:
        """Engines with processes of their own end them; memory is as before."""
        self.engine.close()
        self._held.close()


def in_turns(rivals: Rivals, repeats: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Median seconds of each; they take turns, and the first turn does not count."""
    times: dict[str, list[float]] = {k: [] for k in rivals}
    for turn in range(repeats + 1):
        for k, run in rivals.items():
            begun = clock()
            run()
            if turn:
                times[k].append(clock() - begun)
    return {k: statistics.median(v) for k, v in times.items()}


def beside(
    name: str,
    ours: Ours,
    ways: Sequence[str],
    options: Options,
    goal: float | None,
    moved: str | None = None,
    others: Rivals | None = None,
) -> tuple[dict[str, float], list[Figure]]:
    """Ours against the best of several ways to do the same without a federation; all seconds, and the figures.

    One limit has memory as the C library gives it. The next one keeps what is freed for the next step, as ours does.
    The last one, `moved`, if there is one, also knows what ours does beyond plain torch; it came later than the goal,
    and has none.
    """
    sides = {"": options.workers, KEPT: options.keeping}
    rivals: dict[str, Callable[[], None]] = {"ours": ours} | dict(others or {})
    rivals |= {way + kept: partial(workers, way) for kept, workers in sides.items() for way in ways}
    last = [moved] if moved is not None else []
    rivals |= {way + KEPT: partial(options.keeping, way) for way in last}
    found = in_turns(rivals, options.repeats, CLOCKS[options.clock])
    ours.close()
    best = {min((way + kept for way in ways), key=found.__getitem__): goal for kept in sides}
    return found, [
        Figure(name, found["ours"], found[way], f"{PLAIN} {way}", most, engine=ours.engine_name)
        for way, most in (best | {way + KEPT: None for way in last}).items()
    ]
