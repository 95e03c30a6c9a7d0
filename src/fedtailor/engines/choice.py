"""Which engine suits an experiment and why, and how many clients are stacked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtailor.core.data import count, take
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import Draws, undrawn
from fedtailor.core.trees import Params, Tree, leaves, to_device, tree_map
from fedtailor.engines import devices
from fedtailor.engines.inprocess import InProcess
from fedtailor.engines.machine import can_fork, cores
from fedtailor.errors import ConfigError
from fedtailor.training.kernels.structure import dense_layers

MUCH = 1e9  # floating-point operations in a round from which on processes are worth their messages
MOST = 16  # clients of a measurement
CACHED = 6 * 2**20  # bytes of parameters on which stacked autograd is fast
STACKED = 8 * CACHED  # dense layers cut a stack to the cache by themselves; what is left is to call them seldom
AT_MOST = 256
AT_MOST_ON_DEVICE = 1024
COPIES = 8  # of a model that a client needs at least: parameters, gradients, steps, states


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
    kinds, fault = list(experiment.by_architecture.values()) or [experiment], ""
    if clients >= 4 and all(map(_is_dense, kinds)):
        fault = next(filter(None, map(stack_fault, kinds)), "")
        if not fault:
            each = f", those of each of {len(kinds)} architectures" if len(kinds) > 1 else ""
            return Choice("vmap", f"dense layers of several clients are faster stacked{each}")
        fault = f"; clients cannot be stacked: {fault}"
    processes = min(workers or cores(), clients) if can_fork() else 1
    if processes > 1 and (much := operations(experiment, cohort)) > MUCH:
        why = f"a round has {much / 1e9:.0f} billion operations, enough for {processes} processes"
        return Choice("pool", why + fault)
    why = _why_alone() if processes < 2 else "rounds too short to be spread over processes"
    return Choice("loop", why + fault)


def _why_alone() -> str:
    return "one core" if can_fork() else "this system has no fork for worker processes"


def _on_device(experiment: Experiment, clients: int) -> Choice:
    """A stack keeps a device busy; convolutions of each client by its own kernels may not be faster stacked."""
    device = experiment.device
    if clients < 2 or (fault := stack_fault(experiment)):
        return Choice("loop", "one client" if clients < 2 else f"the model cannot be stacked: {fault}")
    if _is_dense(experiment):
        return Choice("vmap", f"clients stacked keep {device} busy")
    alone, stacked = round_seconds(experiment, clients)
    name: Literal["loop", "vmap"] = "vmap" if stacked < alone else "loop"
    return Choice(name, f"a round took {stacked:.2g} s stacked and {alone:.2g} s one by one on {device}")


def _is_dense(experiment: Experiment) -> bool:
    kinds = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm)
    return not any(isinstance(m, kinds) for m in experiment.model.module.modules())


DRAWS = "it draws random numbers, and each client has its own"


def stack_fault(experiment: Experiment) -> str:
    """Why clients cannot be computed side by side, in a line; empty if they can.

    Found by trial: two clients with other samples each take a step and predict, once stacked and once alone.
    """
    if any(type(m).__name__ == "OptimizedModule" for m in experiment.model.module.modules()):
        return "a part of it is compiled"
    try:
        with undrawn(experiment.device):
            stacked = _step_and_predict(experiment, is_stacked=True)
    except Exception as error:
        if isinstance(error, Draws) or "randomness" in str(error):
            return DRAWS
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {line}"[:200]
    alone = _step_and_predict(experiment, is_stacked=False)
    pairs = zip(stacked, alone, strict=True)
    is_same = all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs)
    return "" if is_same else "its numbers are others when clients are stacked"


def refuse_forced_stack(experiment: Experiment) -> None:
    """Fail where `vmap` is asked for and cannot be; clients with models that draw run one at a time."""
    for kind in list(experiment.by_architecture.values()) or [experiment]:
        if (fault := stack_fault(kind)) and fault != DRAWS:
            raise ConfigError(
                f'federation.engine = "vmap": clients with this model cannot be stacked ({fault}); use engine = "loop"'
            )


def _step_and_predict(experiment: Experiment, *, is_stacked: bool) -> list[Tensor]:
    """Gradients, buffers and predictions of two clients with the first samples."""
    model, rows = experiment.model, experiment.data.train
    x, y = to_device((rows.first(2), rows.y[:2]), model.device)
    pair = tree_map(lambda v: torch.stack([v, v.flip(0)]), {"x": x, "y": y})
    tensors = {k: torch.stack([v, v]) for k, v in (model.params | model.private_buffers).items()}

    def loss(tensors: Params, x: Tree, y: Tensor) -> Tensor:
        return experiment.loss(model(tensors, x, training=True), y).mean()

    def each(function: Callable[..., Tree], *args: Tree) -> Tree:
        if is_stacked:
            return torch.func.vmap(function)(*args)
        both = [function(*tree_map(lambda v, i=i: v[i], args)) for i in range(2)]
        return tree_map(lambda *rows: torch.stack(rows), *both)

    with torch.enable_grad():
        trained = {k: tensors[k].requires_grad_() for k in model.trainable}
        total = each(loss, tensors, pair["x"], pair["y"]).sum()
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        tensors = {k: v.detach() for k, v in tensors.items()}
        outputs = each(model, tensors, pair["x"])
    return [*gradients, *(v for v in leaves(outputs))]


def round_seconds(experiment: Experiment, clients: int) -> tuple[float, float]:
    """Of a round of at most so many clients on a device, measured: one by one, and stacked."""
    cohort = range(min(clients, MOST, len(experiment.data.clients)))
    return _measure_round(experiment, cohort, 0), _measure_round(experiment, cohort, stack_size(experiment))


def _measure_round(experiment: Experiment, cohort: range, chunk: int) -> float:
    """The second of two rounds: in the first, a device prepares its kernels."""
    engine = InProcess(experiment, range(len(experiment.data.clients)), chunk=chunk)
    engine.start()
    fed, server = Federation(engine), experiment.algorithm.server_init(experiment.model)
    seconds = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        fed.run_round(1, cohort, server)
        torch.accelerator.synchronize(experiment.device)
        seconds = time.perf_counter() - begun
    return seconds


def stack_size(experiment: Experiment) -> int:
    """So many clients in a stack that their training is fast."""
    if experiment.device.type != "cpu":
        return _stack_size_on_device(experiment)
    size = sum(v.nbytes for v in experiment.model.params.values())
    is_dense = bool(dense_layers(experiment.model)) and experiment.solver.is_plain
    return max(1, min(AT_MOST, (STACKED if is_dense else CACHED) // size))


def _stack_size_on_device(experiment: Experiment) -> int:
    """As many clients as the memory of the device takes: found by trial, halved until it does."""
    device = experiment.device
    free = devices.free_memory(device)
    chunk = min(len(experiment.data.clients), AT_MOST_ON_DEVICE)
    chunk = chunk if free is None else max(1, min(chunk, free // (COPIES * experiment.model.nbytes)))
    while chunk > 1 and not _takes_a_step(experiment, chunk):
        devices.empty_cache(device)
        chunk //= 2
    return chunk


def _takes_a_step(experiment: Experiment, chunk: int) -> bool:
    """Whether there is room for one step of so many clients side by side."""
    model, rows = experiment.model, experiment.data.train
    size = experiment.solver.batch_size or int(rows.sizes.max())
    at = torch.arange(size, device=rows.home) % len(rows.y)
    x, y = to_device((take(rows.x, at), take(rows.y, at)), model.device)

    def loss(tensors: Params) -> Tensor:
        return experiment.loss(model(tensors, x, training=True), y).mean()

    try:
        tensors = {k: v.expand(chunk, *v.shape).clone() for k, v in (model.params | model.private_buffers).items()}
        trained = {k: tensors[k].requires_grad_() for k in model.trainable}
        with torch.enable_grad():
            total = torch.func.vmap(loss, randomness="different")(tensors | trained).sum()
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        [v - v if g is None else v - g for v, g in zip(trained.values(), gradients, strict=True)]
    except Exception as error:
        return not devices.is_full(error)  # what else is wrong will be said where it happens
    return True


def operations(experiment: Experiment, cohort: int = 0) -> float:
    """Floating-point operations of one pass over the training data of so many clients (0 is all), about."""
    sizes = experiment.data.train.sizes.double()
    return _per_sample(experiment) * float(sizes.mean()) * (cohort or len(sizes))


def _per_sample(experiment: Experiment) -> float:
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
