"""Which engine suits an experiment, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtailor.core.data import count
from fedtailor.core.experiment import Experiment
from fedtailor.core.random import undrawn
from fedtailor.core.trees import Params, to_device
from fedtailor.engines.machine import can_fork, cores
from fedtailor.engines.measuring import round_seconds

MUCH = 1e9  # floating-point operations in a round from which on processes are worth their messages


@dataclass(frozen=True)
class Choice:
    """An engine, and why it is that one."""

    name: Literal["loop", "vmap", "pool"]
    why: str


def choose(experiment: Experiment, cohort: int = 0, workers: int = 0) -> Choice:
    """For rounds of so many clients (0 is all) on so many processes (0 is one per core)."""
    clients = cohort or len(experiment.data.clients)
    if experiment.device.type != "cpu":
        return _on_device(experiment, clients)
    kinds = list(experiment.by_architecture.values()) or [experiment]
    if clients >= 4 and all(_is_dense(kind) and _stacks(kind) for kind in kinds):
        each = f", those of each of {len(kinds)} architectures" if len(kinds) > 1 else ""
        return Choice("vmap", f"dense layers of several clients are faster stacked{each}")
    processes = min(workers or cores(), clients) if can_fork() else 1
    if processes > 1 and (much := operations(experiment, cohort)) > MUCH:
        return Choice("pool", f"a round has {much / 1e9:.0f} billion operations, enough for {processes} processes")
    return Choice("loop", _alone() if processes < 2 else "rounds too short to be spread over processes")


def _alone() -> str:
    return "one core" if can_fork() else "this system has no fork for worker processes"


def _on_device(experiment: Experiment, clients: int) -> Choice:
    """A stack keeps a device busy; convolutions of each client by its own kernels may not be faster stacked."""
    device = experiment.device
    if clients < 2 or not _stacks(experiment):
        return Choice("loop", "one client" if clients < 2 else "the model cannot be stacked")
    if _is_dense(experiment):
        return Choice("vmap", f"clients stacked keep {device} busy")
    alone, stacked = round_seconds(experiment, clients)
    name: Literal["loop", "vmap"] = "vmap" if stacked < alone else "loop"
    return Choice(name, f"a round took {stacked:.2g} s stacked and {alone:.2g} s one by one on {device}")


def _is_dense(experiment: Experiment) -> bool:
    """Whether it neither convolves nor has BatchNorm."""
    kinds = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm)
    return not any(isinstance(m, kinds) for m in experiment.model.module.modules())


def _stacks(experiment: Experiment) -> bool:
    """Whether one pass of two clients side by side works: models that draw random numbers, for one, cannot."""
    model, x = experiment.model, to_device(experiment.data.train.first(2), experiment.device)

    def output(tensors: Params) -> Tensor:
        return model(tensors, x, training=True)

    pair = {k: torch.stack([v, v]) for k, v in (model.params | model.private_buffers).items()}
    try:
        with torch.no_grad(), undrawn(model.device):
            torch.func.vmap(output)(pair)
    except Exception:
        return False
    return True


def operations(experiment: Experiment, cohort: int = 0) -> float:
    """Floating-point operations of one pass over the training data of so many clients (0 is all), about."""
    sizes = experiment.data.train.sizes.double()
    return _per_sample(experiment) * float(sizes.mean()) * (cohort or len(sizes))


def _per_sample(experiment: Experiment) -> float:
    """Operations of a step for each of its samples."""
    model, x = experiment.model, to_device(experiment.data.train.first(1), experiment.device)
    with _Counter() as counter, torch.no_grad():
        model({k: v.clone() for k, v in (model.params | model.private_buffers).items()}, x)
    return 3 * counter.operations / max(count(x), 1)  # a backward pass costs as much as two forward passes


class _Counter(TorchFunctionMode):
    """Counts the operations of products. torch has one, which needs a second to be imported."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        if func in (F.linear, torch.conv1d, torch.conv2d, torch.conv3d):
            weight = (kwargs or {}).get("weight", args[1] if len(args) > 1 else given[-1])
            self.operations += 2 * out.numel() * weight[0].numel()  # each output has one row of the weight
        elif func in (torch.matmul, Tensor.matmul, torch.bmm):
            self.operations += 2 * out.numel() * given[0].shape[-1]
        return out
