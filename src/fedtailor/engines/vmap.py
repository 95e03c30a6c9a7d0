"""`vmap`: clients stacked, so that one tensor operation serves many. For many small clients and dense models.

On a CPU a stack is as large as its cache likes, on another device as large as its memory allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedtailor.core.data import take
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Params, to_device
from fedtailor.engines import devices
from fedtailor.engines.disk import Disk
from fedtailor.engines.inprocess import InProcess
from fedtailor.training.kernels.structure import dense_layers

CACHED = 6 * 2**20  # bytes of parameters on which stacked autograd is fast
STACKED = 8 * CACHED  # dense layers cut a stack to the cache by themselves; what is left is to call them seldom
AT_MOST = 256
AT_MOST_ON_DEVICE = 1024
COPIES = 8  # of a model that a client needs at least: parameters, gradients, steps, states


def vmap(experiment: Experiment, chunk: int = 0, disk: Disk | None = None) -> InProcess:
    """Stacks of clients of similar size, at most `chunk`; the shorter ones are padded and masked."""
    return InProcess(experiment, range(len(experiment.data.clients)), chunk=chunk or fitting(experiment), disk=disk)


def fitting(experiment: Experiment) -> int:
    """So many clients in a stack that their training is fast."""
    if experiment.device.type != "cpu":
        return fitting_on_device(experiment)
    size = sum(v.nbytes for v in experiment.model.params.values())
    is_dense = bool(dense_layers(experiment.model)) and experiment.solver.is_plain
    return max(1, min(AT_MOST, (STACKED if is_dense else CACHED) // size))


def fitting_on_device(experiment: Experiment) -> int:
    """As many clients as the memory of the device takes: found by trial, halved until it does."""
    device = experiment.device
    free = devices.free_memory(device)
    chunk = min(len(experiment.data.clients), AT_MOST_ON_DEVICE)
    chunk = chunk if free is None else max(1, min(chunk, free // (COPIES * experiment.model.nbytes)))
    while chunk > 1 and not _takes_a_step(experiment, chunk):
        devices.let_go(device)
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
