"""How fast a round is, beside the limit that is measured in the same run.

    python -m benchmarks.speed [--workload A,B,C,D,E,F] [--engine auto] [--repeats 5] [--clock wall] [--small]
                               [--json FILE]

Ours and the limit take turns; figures are medians, the first turn is for warming up. `ratio` is ours / limit, `goal`
the most that it should be. With FEDTAILOR_DATA set the images are MNIST, otherwise noise of the same shape.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed_core import CLOCKS, LAYOUTS, Figure, Options, Ours, beside, dealt, images, setting
from benchmarks.speed_growth import growth, learn2pfed
from benchmarks.speed_limits import PHASES, Clients, Round, Workers, fused, plain, usual
from benchmarks.speed_networks import networks
from benchmarks.speed_tasks import CLASSES, LR, SHAPE, SMALL, TASKS, ConvNet, Task, title
from fedtailor import algorithms, engines
from fedtailor.core.experiment import Experiment
from fedtailor.data.partitions import dirichlet
from fedtailor.models import build
from fedtailor.training.solver import Solver


def load(options: Options, make: Callable[..., dict[str, Round]], clients: Clients, *args: Any) -> None:
    """Give both limits the clients of a round."""
    for workers in (options.workers, options.keeping):
        workers.load(make, clients, *args)


BY_HAND = "channels_last, by hand"


def cohort_of(made: Experiment, task: Task) -> Clients:
    """As much data as one round uses."""
    return [made.data.train.of(c) for c in range(task.cohort)]


def workload_a(options: Options) -> Iterator[Figure]:
    """A convolutional network."""
    task = (SMALL if options.small else TASKS)["A"]
    made = setting("A", task, algorithms.make("fedavg", {}))
    load(options, plain, cohort_of(made, task), ConvNet(pools_first=True), task.batch, PHASES["FedAvg"])
    ours = Ours(made, options.engine, task.cohort)
    yield from beside(title("A", task), ours, LAYOUTS, options, 1.08, BY_HAND)[1]


def workload_b(options: Options) -> Iterator[Figure]:
    """A dense network at many small clients."""
    task = (SMALL if options.small else TASKS)["B"]
    made = setting("B", task, algorithms.make("fedavg", {}))
    load(options, fused, cohort_of(made, task), task.batch)
    ours = Ours(made, options.engine, task.cohort)
    ways = ("5 clients per chunk", "10 clients per chunk")
    yield from beside(title("B", task), ours, ways, options, 1.25, "all steps in one pass")[1]


def workload_c(options: Options) -> Iterator[Figure]:
    """Personal models of 20 clients, against the usual way and against plain torch; a fifth of MNIST."""
    x, y = images(40 if options.small else 10_500)
    parts = dirichlet(y.numpy(), 3 if options.small else 20, 0, 0.1, min_samples=10)
    data, module = dealt(parts, x, y), ConvNet()
    clients = [data.train.of(c) for c in range(len(parts))]
    for method, own in (("FedRep", {"head_epochs": 1}), ("Ditto", {}), ("FedSelect", {})):
        algorithm = algorithms.make(method.lower(), own)
        model = build("cnn", SHAPE, CLASSES, seed=0)
        ours = Ours(Experiment(algorithm, model, data, Solver(lr=LR, batch_size=10), 0), options.engine)
        options.alone.load(usual, clients, module, 10, method)
        load(options, plain, clients, ConvNet(pools_first=True), 10, PHASES[method])
        name = f"C: {method}, {len(parts)} clients, {len(x)} images, batch 10"
        others = {"usual": partial(options.alone, "usual")}
        found, limits = beside(name, ours, LAYOUTS[1:], options, None, BY_HAND, others)
        usual_way = "DataLoader, client after client, 2 threads"
        yield Figure(name, found["ours"], found["usual"], usual_way, 1 / 1.7, engine=ours.engine_name)
        yield from limits


WORKLOADS: dict[str, Callable[[Options], Iterator[Figure]]] = {
    "A": workload_a,
    "B": workload_b,
    "C": workload_c,
    "D": learn2pfed,
    "E": growth,
    "F": networks,
}


def line(figure: Figure) -> str:
    """A figure for people."""
    goal = "" if figure.goal is None else f"{figure.goal:6.2f}"
    unit = {"s": "s", "gb": "GB"}[figure.unit]
    return (
        f"{figure.workload:56} {figure.ours:9.4f} {unit:2} {figure.limit:9.4f} {unit:2} {figure.ratio:6.2f} {goal:>6}"
        f"  {figure.against}{f'; ours: {figure.engine}' if figure.engine else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="which, such as A,B")
    parser.add_argument("--engine", default="auto", choices=["auto", *engines.ENGINES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor seconds where others compute, too")
    parser.add_argument("--small", action="store_true", help="tiny tasks: whether it runs, not how fast it is")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    asked = parser.parse_args()
    options = Options(
        Workers(), Workers(keeps=True), Workers(is_alone=True), asked.engine, asked.repeats, asked.small, asked.clock
    )
    print(f"images: {'MNIST' if os.environ.get('FEDTAILOR_DATA') else 'noise'}; torch {torch.__version__}")
    print(f"{'workload':56} {'ours':>12} {'limit':>12} {'ratio':>6} {'goal':>6}  limit is")
    figures: list[Figure] = []
    for name in asked.workload.split(","):
        if name not in WORKLOADS:
            parser.error(f"--workload {name}: there are {', '.join(WORKLOADS)}")
        for figure in WORKLOADS[name](options):
            figures.append(figure)
            print(line(figure), flush=True)
    for workers in (options.workers, options.keeping, options.alone):
        workers.close()
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps([f.row() for f in figures], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
