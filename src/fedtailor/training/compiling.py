"""`local.compile`: the loss of a step, and with it its gradient, by torch.compile; equal up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.experiment import Experiment
from fedtailor.core.model import Model
from fedtailor.core.random import seeded
from fedtailor.core.task import Loss
from fedtailor.core.trees import Params, Tree, to_device, tree_map
from fedtailor.errors import ConfigError
from fedtailor.training.arithmetic import Arithmetic, mean_loss

SHAPES = 64  # kinds of batches and sets of trained parameters for which a model is compiled anew


def batch_loss(
    model: Model, loss: Loss, how: Arithmetic, is_stacked: bool, tensors: Params, x: Tree, y: Tensor, w: Tensor | None
) -> Tensor:
    """The mean loss of a batch with weights `w`; of a stack, one for each client."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    model.prepare(tensors, training=True)
    try:
        return _compiled_loss(model, how, is_stacked)(loss, tensors, x, y, w)
    except (TorchDynamoException, InductorError, InvalidCxxCompiler) as error:
        why = next(line for line in str(error).splitlines() if line.strip())
        raise ConfigError(
            f"local.compile: torch.compile does not work for this model on {model.device} ({why}); leave it out",
            code="config.system",
        ) from error


def check(experiment: Experiment, how: Arithmetic, batch_size: int) -> None:
    """Compile a first step, so that errors come before there is a run."""
    model = experiment.model
    if model.warm_starts:
        raise ConfigError("local.compile: not for equilibrium models, whose solver decides in each step when to stop")
    (x, y), size = experiment.data.train.of(0), batch_size or len(experiment.data.train.y)
    x, y = to_device(tree_map(lambda v: v[:size], (x, y)), model.device)
    tensors = model.params | model.private_buffers
    tensors = {k: v.clone().requires_grad_(k in model.trainable) for k, v in tensors.items()}
    with seeded("compile", device=model.device), torch.enable_grad():
        total = batch_loss(model, experiment.loss, how, False, tensors, x, y, None)
        torch.autograd.grad(total, [tensors[k] for k in model.trainable], allow_unused=True)


@lru_cache(maxsize=4)
def _compiled_loss(model: Model, how: Arithmetic, is_stacked: bool) -> Callable[..., Tensor]:
    """Kept, as torch compiles a function once for each kind of input."""

    def of_client(loss: Loss, tensors: Params, x: Tree, y: Tensor, w: Tensor | None) -> Tensor:
        with how.cast(model.device):
            output = model.forward(tensors, x)
        return mean_loss(loss(output.to(model.dtype) if how.is_lower else output, y), w)

    def of_stack(loss: Loss, tensors: Params, x: Tree, y: Tensor, w: Tensor | None) -> Tensor:
        def one(tensors: Params, x: Tree, y: Tensor, w: Tensor | None) -> Tensor:
            return of_client(loss, tensors, x, y, w)

        return torch.func.vmap(one, in_dims=(0, 0, 0, None if w is None else 0))(tensors, x, y, w)

    options: dict[str, Any] = {"recompile_limit": SHAPES, "isolate_recompiles": True}
    options |= {"options": {"fallback_random": True}}  # dropout draws what it draws in plain steps
    compiled: Callable[..., Tensor] = torch.compile(of_stack if is_stacked else of_client, **options)
    return compiled
