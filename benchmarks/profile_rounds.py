"""Where the time of a round goes, in percent.

    python -m benchmarks.profile_rounds [--workload A,B] [--engine loop] [--rounds 3] [--small]

Every function below is timed without the functions of the list that it calls, so that the parts add up to the whole.
Clients run in one process of one thread, as each worker process does, into which one cannot see from here.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from functools import reduce, wraps
from typing import Any

from benchmarks.speed_core import Ours, setting
from benchmarks.speed_tasks import SMALL, TASKS, title
from fedtailor import algorithms, engines

PARTS = {  # what is timed -> where it is
    "forward pass and loss": (
        "fedtailor.training.kernels.selection:descent.descend",
        "fedtailor.training.steps:_gradient",
    ),
    "backward pass": ("torch.autograd:grad",),
    "dense layers: forward and backward": ("fedtailor.training.kernels.dense:_train_part",),
    "update of parameters": (
        "torch:_foreach_add_",
        "torch:Tensor.addmm_",
        *(f"fedtailor.training.kernels.dense:{k}" for k in ("_descend", "DeferredWeightUpdate.finish")),
    ),
    "copies of parameters": ("fedtailor.training.steps:take_steps",),
    "batches: drawing": ("fedtailor.training.solver:Solver._batches",),
    "batches: indexing": ("torch:Tensor.__getitem__", "torch:Tensor.index_select"),
    "private states": tuple(f"fedtailor.engines.states:States.{k}" for k in ("read", "write", "check", "begin")),
    "checks of replies": ("fedtailor.core.federation:validate",),
    "messages: counting bytes": ("fedtailor.core.codec:total_size", "fedtailor.core.federation:bytes_down"),
    "aggregation": ("fedtailor.core.federation:Federation.mean", "fedtailor.core.reduce:_RunningSums.add"),
}
REST = "engine, dispatch and the rest"


class Clock:
    """Time by part; that of a part within another counts for the inner one only."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.open: list[str] = []
        self.since = time.perf_counter()

    def switch(self) -> None:
        """What has passed since the last switch belongs to the innermost part."""
        now = time.perf_counter()
        self.spent[self.open[-1] if self.open else REST] += now - self.since
        self.since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self.open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self.open.pop()

        return wrapped


def find(place: str) -> tuple[Any, str]:
    """The module or class that holds a function, and the function's name."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    return reduce(getattr, owners, importlib.import_module(module)), name


def install(clock: Clock) -> None:
    """Put the clock around every function of the list."""
    for part, places in PARTS.items():
        for owner, name in map(find, places):
            setattr(owner, name, clock.timed(part, getattr(owner, name)))


def profile(workload: str, engine: engines.EngineName, rounds: int, small: bool) -> dict[str, float]:
    """Part of the time of some rounds, by what it was used for."""
    task = (SMALL if small else TASKS)[workload]
    run = Ours(setting(workload, task, algorithms.make("fedavg", {})), engine, task.cohort, workers=1, threads=1)
    run()
    CLOCK.spent.clear()
    CLOCK.since = time.perf_counter()
    for _ in range(rounds):
        run()
    CLOCK.switch()
    run.close()
    total = sum(CLOCK.spent.values())
    return {part: spent / total for part, spent in CLOCK.spent.items()} | {"seconds": total / rounds}


CLOCK = Clock()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default="A,B")
    parser.add_argument("--engine", choices=engines.ENGINES, help="loop for A and vmap for B if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny tasks: whether it runs")
    asked = parser.parse_args()
    install(CLOCK)
    workloads = asked.workload.split(",")
    chosen: dict[str, engines.EngineName] = {"A": asked.engine or "loop", "B": asked.engine or "vmap"}
    found = {k: profile(k, chosen[k], asked.rounds, asked.small) for k in workloads}
    for k in workloads:
        print(f"- {title(k, (SMALL if asked.small else TASKS)[k])}; {chosen[k]}, {found[k]['seconds']:.3f} s per round")
    print("\n| part of the time |" + "".join(f" {k} % |" for k in workloads) + "\n|---|" + "---:|" * len(workloads))
    for part in (*PARTS, REST):
        print(f"| {part} |" + "".join(f" {100 * found[k].get(part, 0.0):.1f} |" for k in workloads))


if __name__ == "__main__":
    main()
