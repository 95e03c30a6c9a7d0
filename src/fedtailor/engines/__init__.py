"""Where the clients run. The algorithm does not know."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtailor.core.client import initial
from fedtailor.core.disk import Disk
from fedtailor.core.federation import Engine
from fedtailor.core.me import Setting
from fedtailor.core.trees import leaves
from fedtailor.engines import pages
from fedtailor.engines.loop import loop
from fedtailor.engines.pool import Pool
from fedtailor.engines.vmap import fitting, vmap
from fedtailor.engines.wire import Wire
from fedtailor.errors import ConfigError

EngineName = Literal["auto", "loop", "vmap", "pool", "wire", "flare"]

ENGINES = {
    "loop": "one client after the other; the reference",
    "vmap": "clients stacked into one tensor operation; for many small clients and dense models",
    "pool": "worker processes, one per core; for convolutions and whatever does not stack",
    "wire": "every message through bytes; for tests and exact traffic",
    "flare": "a real federation of sites, each with its own data; see fedtailor federation --help",
}
MUCH = 1e9  # floating-point operations in a round from which on processes are worth their messages
MUCH_AT_ONCE = 1e9  # and in a step, from which on threads are worth waiting for each other


def make(
    name: EngineName,
    setting: Setting,
    chunk: int = 0,
    workers: int = 0,
    disk: Disk | None = None,
    cohort: int = 0,
) -> Engine:
    """An engine by name. A pool has so many workers, 0 is one per core; clients are stacked in several processes if
    that is told, and rounds of so many clients (0 is all) are worth it.

    Private states that do not fit the budget of `disk` cannot be shared by processes: these clients run in this one.
    """
    pages.keep()
    if name == "auto":
        name = choose(setting, cohort, workers).name
    if name == "wire":
        return Wire(setting)
    if name == "flare":
        raise ConfigError('federation.engine = "flare": run it with fedtailor federation submit')
    processes = min(workers or (cores() if name == "pool" else 1), len(setting.data.clients))
    if processes > 1 and name != "loop" and _fits(setting, disk):
        if name == "pool":
            return Pool(setting, processes)
        if not setting.algorithm.at_once and operations(setting, cohort) > MUCH:
            return Pool(setting, processes, chunk or fitting(setting))
    return vmap(setting, chunk, disk) if name == "vmap" else loop(setting, disk)


def _fits(setting: Setting, disk: Disk | None) -> bool:
    """Whether the private states of all clients, those before a round beside those after, are within the budget."""
    if disk is None:
        return True
    size = sum(v.nbytes for v in leaves(initial(setting, [0], is_stacked=False)))
    return 2 * size * len(setting.data.clients) <= disk.budget


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(setting: Setting) -> int:
    """All, for large convolutions. The threads of small steps would wait for each other longer than they compute."""
    if not _convolves(setting):
        return 1
    samples = setting.solver.batch_size or float(setting.data.train.sizes.double().mean())
    return torch.get_num_threads() if samples * _per_sample(setting) > MUCH_AT_ONCE else 1


def _convolves(setting: Setting) -> bool:
    return any(isinstance(m, (nn.modules.conv._ConvNd, nn.RNNBase)) for m in setting.model.module.modules())


def operations(setting: Setting, cohort: int = 0) -> float:
    """Floating-point operations of one pass over the training data of so many clients (0 is all), about."""
    sizes = setting.data.train.sizes.double()
    return _per_sample(setting) * float(sizes.mean()) * (cohort or len(sizes))


def _per_sample(setting: Setting) -> float:
    """Operations of a step for each of its samples."""
    model, x = setting.model, setting.data.train.x
    with _Counter() as counter, torch.no_grad():
        model(model.params | model.private_buffers, x.new_zeros(1, *x.shape[1:]))
    return 3 * counter.operations  # a backward pass costs as much as two forward passes


class _Counter(TorchFunctionMode):
    """Counts the operations of products. torch has one, which needs a second to be imported."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.linear, torch.conv1d, torch.conv2d, torch.conv3d):
            self.operations += 2 * out.numel() * args[1][0].numel()  # each output has one row of the weight
        elif func in (torch.matmul, Tensor.matmul, torch.bmm):
            self.operations += 2 * out.numel() * args[0].shape[-1]
        return out


@dataclass(frozen=True)
class Choice:
    """An engine, and why it is that one."""

    name: Literal["loop", "vmap", "pool"]
    why: str


def choose(setting: Setting, cohort: int = 0, workers: int = 0) -> Choice:
    """For rounds of so many clients (0 is all) on so many processes (0 is one per core)."""
    clients = cohort or len(setting.data.clients)
    if not (_convolves(setting) or setting.model.batch_statistics or clients < 4):
        return Choice("vmap", "dense layers of several clients are faster stacked")
    processes = min(workers or cores(), clients)
    if processes > 1 and (much := operations(setting, cohort)) > MUCH:
        return Choice("pool", f"a round has {much / 1e9:.0f} billion operations, enough for {processes} processes")
    return Choice("loop", "one core" if processes < 2 else "rounds too short to be spread over processes")
