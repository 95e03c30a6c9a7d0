"""Engines: where clients run. Algorithms do not know which one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fedtailor.core.client import initial
from fedtailor.core.engine import Engine
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import leaves
from fedtailor.engines import devices, machine
from fedtailor.engines.choice import MUCH, Choice, choose, operations, refuse_forced_stack, stack_size
from fedtailor.engines.disk import Disk
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.machine import cores
from fedtailor.engines.pool.pool import Pool
from fedtailor.engines.wire import Wire
from fedtailor.errors import ConfigError

__all__ = [
    "ENGINES",
    "Choice",
    "EngineName",
    "choose",
    "cores",
    "make",
    "open_engine",
    "operations",
    "refuse_forced_stack",
]

EngineName = Literal["auto", "loop", "vmap", "pool", "wire", "flare"]

ENGINES = {
    "loop": "one client after the other; the reference",
    "vmap": "clients stacked into one tensor operation; for many small clients and dense models",
    "pool": "worker processes, one per core; for convolutions and whatever does not stack",
    "wire": "every message through bytes; for tests and exact traffic",
    "flare": "a real federation of sites, each with its own data; see fedtailor federation --help",
}
STACK = 2.5e9  # floating-point operations that a stack of a long round has at least: fewer are not worth its messages


def make(
    name: EngineName,
    experiment: Experiment,
    chunk: int = 0,
    workers: int = 0,
    disk: Disk | None = None,
    cohort: int = 0,
) -> Engine:
    """An engine by name.

    `workers`: processes of a pool; 0 is one per core. `vmap` uses several processes only if `workers` asks for them and
    rounds of `cohort` clients (0 is all) are long enough. `chunk`: clients per stack; 0 is as many as fit the cache.

    Private states that do not fit the budget of `disk` cannot be shared by processes: these clients run in this one.
    """
    clients = len(experiment.data.clients)
    if name == "auto":
        name = choose(experiment, cohort, workers).name
    if name == "wire":
        return Wire(experiment)
    if name == "flare":
        raise ConfigError('federation.engine = "flare": run it with fedtailor federation submit')
    if name == "loop":
        return InProcess(experiment, disk=disk)
    if experiment.device.type != "cpu":
        return _on_device(name, experiment, chunk, workers, disk, cohort)
    processes = min(workers or (cores() if name == "pool" else 1), clients)
    if name == "pool":
        return (
            Pool(experiment, processes)
            if processes > 1 and _fits(experiment, disk)
            else InProcess(experiment, disk=disk)
        )
    # stacks depend on the experiment alone, so that results do not depend on the machine
    much = operations(experiment, cohort)
    is_long = not experiment.algorithm.at_once and much > MUCH
    stack = chunk or stack_size(experiment)
    if is_long and not chunk:
        stack = min(stack, math.ceil((cohort or clients) / _stacks(much)))
    if is_long and processes > 1 and _fits(experiment, disk):
        return Pool(experiment, processes, stack)
    return InProcess(experiment, chunk=stack, disk=disk)


def _stacks(much: float) -> int:
    """Stacks of a round of so many operations: a power of two that depends on the round alone, not on the cores."""
    return 2 ** max(1, math.floor(math.log2(max(much / STACK, 1))))


def _on_device(
    name: EngineName, experiment: Experiment, chunk: int, workers: int, disk: Disk | None, cohort: int
) -> Engine:
    """An engine on a device other than the CPU; a pool has one worker per device by default."""
    clients = len(experiment.data.clients)
    is_stacked = name == "vmap" or choose(experiment, cohort).name == "vmap"
    stack = (chunk or stack_size(experiment)) if is_stacked else 0
    processes = min(workers or devices.count(experiment.device), clients) if name == "pool" else 1
    if processes > 1 and _fits(experiment, disk):
        return Pool(experiment, processes, min(stack, math.ceil((cohort or clients) / processes)))
    return InProcess(experiment, chunk=stack, disk=disk)


@contextmanager
def open_engine(name: EngineName, experiment: Experiment, *, threads: int = 1, **options: Any) -> Iterator[Engine]:
    """An engine that has been started; thread and memory settings of the process are restored afterwards."""
    with machine.training_settings(threads):
        engine = make(name, experiment, **options)
        try:
            engine.start()
            yield engine
        finally:
            engine.close()


def _fits(experiment: Experiment, disk: Disk | None) -> bool:
    """Whether the private states of all clients, those before a round beside those after, are within the budget."""
    if disk is None:
        return True
    size = sum(v.nbytes for v in leaves(initial(experiment, [0], is_stacked=False)))
    return 2 * size * len(experiment.data.clients) <= disk.budget
