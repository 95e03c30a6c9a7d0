"""How fast a round is, beside the limit that is measured in the same run.

    python -m benchmarks.speed [--workload A,B,C,D,E] [--engine auto] [--repeats 5] [--small] [--json FILE]

Ours and the limit take turns; figures are medians, the first turn is for warming up. `ratio` is ours / limit, `goal`
the most that it should be. With FEDTAILOR_DATA set the images are MNIST, otherwise noise of the same shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed_limits import PHASES, Clients, Workers, fused, plain, usual
from benchmarks.speed_tasks import CLASSES, LR, SHAPE, SMALL, TASKS, TITLES, ConvNet, Task, noise
from fedtailor import algorithms, engines
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.federation import Federation
from fedtailor.core.me import Setting
from fedtailor.core.random import stream
from fedtailor.data.federated import FederatedData, Rows
from fedtailor.data.files import data_root
from fedtailor.data.images import DIGITS, mnist
from fedtailor.data.partitions import dirichlet
from fedtailor.engines import EngineName
from fedtailor.local.training import Solver
from fedtailor.models import build


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


def setting(workload: str, task: Task, algorithm: Algorithm) -> Setting:
    """Workload A or B."""
    data = dealt(np.split(np.arange(task.clients * task.samples), task.clients), *images(task.clients * task.samples))
    model = (
        build("cnn", SHAPE, CLASSES, seed=0)
        if workload == "A"
        else build("mlp", SHAPE, CLASSES, seed=0, options={"hidden": (200,)})
    )
    return Setting(algorithm, model, data, Solver(lr=LR, batch_size=task.batch), 0)


class Ours:
    """Rounds of the federation, each with clients drawn anew."""

    def __init__(self, setting: Setting, engine: EngineName, cohort: int = 0) -> None:
        self.threads = engines.threads(setting)
        self.engine = engines.make(engine, setting)
        self.engine.start()
        self.federation = Federation(self.engine)
        self.server = setting.algorithm.server_init(setting.model)
        self.cohort, self.round = cohort or len(setting.data.clients), 0

    def __call__(self) -> None:
        self.round += 1
        clients = len(self.engine.setting.data.clients)
        drawn = stream(0, self.round, "cohort").choice(clients, size=self.cohort, replace=False)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.server = self.federation.run_round(self.round, sorted(drawn.tolist()), self.server)
        torch.set_num_threads(before)

    def close(self) -> None:
        """Engines with processes of their own end them."""
        getattr(self.engine, "close", lambda: None)()


def in_turns(rivals: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each; they take turns, and the first turn does not count."""
    times: dict[str, list[float]] = {k: [] for k in rivals}
    for turn in range(repeats + 1):
        for k, run in rivals.items():
            begun = time.perf_counter()
            run()
            if turn:
                times[k].append(time.perf_counter() - begun)
    return {k: statistics.median(v) for k, v in times.items()}


def beside(title: str, ours: Ours, workers: Workers, ways: tuple[str, ...], options: Options, goal: float) -> Figure:
    """Ours against the best of several ways to do the same without a federation."""
    rivals = {way: lambda way=way: workers(way) for way in ways}
    found = in_turns({"ours": ours} | rivals, options.repeats)
    ours.close()
    workers.close()
    best = min(ways, key=lambda way: found[way])
    return Figure(title, found["ours"], found[best], f"plain torch, {len(workers.pipes)} processes, {best}", goal)


LAYOUTS = ("contiguous", "channels_last")


def cohort_of(made: Setting, task: Task) -> Clients:
    """As much data as one round uses."""
    return [made.data.train.of(c) for c in range(task.cohort)]


def workload_a(options: Options) -> Iterator[Figure]:
    """A convolutional network."""
    task = (SMALL if options.small else TASKS)["A"]
    made = setting("A", task, algorithms.make("fedavg", {}))
    workers = Workers(plain, cohort_of(made, task), ConvNet(), task.batch, PHASES["FedAvg"])
    yield beside(f"A: {TITLES['A']}", Ours(made, options.engine, task.cohort), workers, LAYOUTS, options, 1.08)


def workload_b(options: Options) -> Iterator[Figure]:
    """A dense network at many small clients."""
    task = (SMALL if options.small else TASKS)["B"]
    made = setting("B", task, algorithms.make("fedavg", {}))
    workers = Workers(fused, cohort_of(made, task), task.batch)
    ways = ("5 clients per chunk", "10 clients per chunk")
    yield beside(f"B: {TITLES['B']}", Ours(made, options.engine, task.cohort), workers, ways, options, 1.25)


def workload_c(options: Options) -> Iterator[Figure]:
    """Personal models of 20 clients, against the usual way and against plain torch; a fifth of MNIST."""
    x, y = images(200 if options.small else 10_500)
    parts = dirichlet(y.numpy(), 3 if options.small else 20, 0, 0.1, min_samples=10)
    data, module = dealt(parts, x, y), ConvNet()
    clients = [data.train.of(c) for c in range(len(parts))]
    for title, own in (("FedRep", {"head_epochs": 1}), ("Ditto", {}), ("FedSelect", {})):
        algorithm = algorithms.make(title.lower(), own)
        model = build("cnn", SHAPE, CLASSES, seed=0)
        ours = Ours(Setting(algorithm, model, data, Solver(lr=LR, batch_size=10), 0), options.engine)
        workers = Workers(plain, clients, module, 10, PHASES[title])
        usually = usual(clients, module, 10, title)

        def two_threads(run: Callable[[], None] = usually) -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(1 if options.small else 2)
            run()
            torch.set_num_threads(before)

        rivals = {way: lambda way=way, workers=workers: workers(way) for way in LAYOUTS}
        found = in_turns({"ours": ours, "usual": two_threads} | rivals, options.repeats)
        ours.close()
        workers.close()
        best = min(LAYOUTS, key=lambda way: found[way])
        name = f"C: {title}, {len(parts)} clients, batch 10"
        usual_way = "DataLoader, client after client, 2 threads"
        yield Figure(name, found["ours"], found["usual"], usual_way, 1 / 1.7)
        yield Figure(name, found["ours"], found[best], f"plain torch, {len(workers.pipes)} processes, {best}")


def workload_d(options: Options) -> Iterator[Figure]:
    """Learn2pFed: all clients at once."""
    from benchmarks.speed_growth import learn2pfed

    yield from learn2pfed(options)


def workload_e(options: Options) -> Iterator[Figure]:
    """Growth in clients, parameters and rounds, and the time to start."""
    from benchmarks.speed_growth import growth

    yield from growth(options)


WORKLOADS: dict[str, Callable[[Options], Iterator[Figure]]] = {
    "A": workload_a,
    "B": workload_b,
    "C": workload_c,
    "D": workload_d,
    "E": workload_e,
}


def line(figure: Figure) -> str:
    """A figure for people."""
    goal = "" if figure.goal is None else f"{figure.goal:6.2f}"
    unit = {"s": "s", "gb": "GB"}[figure.unit]
    return (
        f"{figure.workload:56} {figure.ours:9.4f} {unit:2} {figure.limit:9.4f} {unit:2} {figure.ratio:6.2f} {goal:>6}"
        f"  {figure.against}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="which, such as A,B")
    parser.add_argument("--engine", default="auto", choices=["auto", *engines.ENGINES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny tasks: whether it runs, not how fast it is")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    asked = parser.parse_args()
    options = Options(asked.engine, asked.repeats, asked.small)
    print(f"images: {'MNIST' if os.environ.get('FEDTAILOR_DATA') else 'noise'}; torch {torch.__version__}")
    print(f"{'workload':56} {'ours':>12} {'limit':>12} {'ratio':>6} {'goal':>6}  limit is")
    figures: list[Figure] = []
    for name in asked.workload.split(","):
        if name not in WORKLOADS:
            parser.error(f"--workload {name}: there are {', '.join(WORKLOADS)}")
        for figure in WORKLOADS[name](options):
            figures.append(figure)
            print(line(figure), flush=True)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps([f.row() for f in figures], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
