"""How fast a round is, beside the limit that is measured in the same run.

    python -m benchmarks.speed [--workload A,B,C,D,E] [--engine auto] [--repeats 5] [--small] [--json FILE]

Ours and the limit take turns; figures are medians, the first turn is for warming up. `ratio` is ours / limit, `goal`
the most that it should be. With FEDTAILOR_DATA set the images are MNIST, otherwise noise of the same shape.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed_core import Figure, Options, Ours, dealt, images, in_turns, setting
from benchmarks.speed_growth import growth, learn2pfed
from benchmarks.speed_limits import PHASES, Clients, Round, Workers, fused, plain, usual
from benchmarks.speed_tasks import CLASSES, LR, SHAPE, SMALL, TASKS, ConvNet, Task, title
from fedtailor import algorithms, engines
from fedtailor.core.experiment import Experiment
from fedtailor.data.partitions import dirichlet
from fedtailor.models import build
from fedtailor.training.solver import Solver


def beside(
    name: str,
    ours: Ours,
    ways: Sequence[str],
    moved: str,
    options: Options,
    goal: float | None,
    others: Rivals | None = None,
) -> tuple[dict[str, float], list[Figure]]:
    """Ours against the best of several ways to do the same without a federation; all seconds, and the figures.

    One limit has memory as the C library gives it. The next one keeps what is freed for the next step, as ours does.
    The last one, `moved`, also knows what ours does beyond plain torch; it came later than the goal, and has none.
    """
    sides = {"": options.workers, KEPT: options.keeping}
    rivals: dict[str, Callable[[], None]] = {"ours": ours} | dict(others or {})
    rivals |= {way + kept: partial(workers, way) for kept, workers in sides.items() for way in ways}
    rivals |= {moved + KEPT: partial(options.keeping, moved)}
    found = in_turns(rivals, options.repeats)
    ours.close()
    best = {min((way + kept for way in ways), key=lambda way: found[way]): goal for kept in sides}
    return found, [
        Figure(name, found["ours"], found[way], f"{PLAIN} {way}", most, engine=ours.engine_name)
        for way, most in (best | {moved + KEPT: None}).items()
    ]


def load(options: Options, make: Callable[..., dict[str, Round]], clients: Clients, *args: Any) -> None:
    """Give both limits the clients of a round."""
    for workers in (options.workers, options.keeping):
        workers.load(make, clients, *args)


Rivals = Mapping[str, Callable[[], None]]
LAYOUTS, BY_HAND = ("contiguous", "channels_last"), "channels_last, by hand"
KEPT, PLAIN = ", freed memory kept", f"plain torch, {engines.cores()} processes,"


def cohort_of(made: Experiment, task: Task) -> Clients:
    """As much data as one round uses."""
    return [made.data.train.of(c) for c in range(task.cohort)]


def workload_a(options: Options) -> Iterator[Figure]:
    """A convolutional network."""
    task = (SMALL if options.small else TASKS)["A"]
    made = setting("A", task, algorithms.make("fedavg", {}))
    load(options, plain, cohort_of(made, task), ConvNet(pools_first=True), task.batch, PHASES["FedAvg"])
    ours = Ours(made, options.engine, task.cohort)
    yield from beside(title("A", task), ours, LAYOUTS, BY_HAND, options, 1.08)[1]


def workload_b(options: Options) -> Iterator[Figure]:
    """A dense network at many small clients."""
    task = (SMALL if options.small else TASKS)["B"]
    made = setting("B", task, algorithms.make("fedavg", {}))
    load(options, fused, cohort_of(made, task), task.batch)
    ours = Ours(made, options.engine, task.cohort)
    ways = ("5 clients per chunk", "10 clients per chunk")
    yield from beside(title("B", task), ours, ways, "all steps in one pass", options, 1.25)[1]


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
        found, limits = beside(name, ours, LAYOUTS[1:], BY_HAND, options, None, others)
        usual_way = "DataLoader, client after client, 2 threads"
        yield Figure(name, found["ours"], found["usual"], usual_way, 1 / 1.7, engine=ours.engine_name)
        yield from limits


WORKLOADS: dict[str, Callable[[Options], Iterator[Figure]]] = {
    "A": workload_a,
    "B": workload_b,
    "C": workload_c,
    "D": learn2pfed,
    "E": growth,
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
    parser.add_argument("--small", action="store_true", help="tiny tasks: whether it runs, not how fast it is")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    asked = parser.parse_args()
    options = Options(Workers(), Workers(keeps=True), Workers(is_alone=True), asked.engine, asked.repeats, asked.small)
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
