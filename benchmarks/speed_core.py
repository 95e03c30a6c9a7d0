"""What every measurement of speed needs: tasks for our side, rivals that take turns, and a figure for the table."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
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


def in_turns(rivals: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each; they take turns, and the first turn does not count."""
    times: dict[str, list[float]] = {k: [] for k in rivals}
    for turn in range(repeats + 1):
        for k, run in rivals.items():
            begun = time.perf_counter()
            run()
            if turn:
                times[k].append(time.perf_counter() - begun)
    return {k: statistics.median(v) for k, v in times.items()}
