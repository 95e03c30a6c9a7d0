"""What is to be predicted: the loss of a sample, and what is measured of a prediction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def classification_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every sample."""
    return torch.nn.functional.cross_entropy(output, target, reduction="none")


def regression_loss(output: Tensor, target: Tensor) -> Tensor:
    """Squared error of every sample, mean over the target columns."""
    if output.shape != target.shape:  # broadcasting would compare every sample with every other
        raise ValueError(f"outputs have shape {list(output.shape)}, targets {list(target.shape)}")
    return (output - target).square().mean(dim=-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": classification_loss,
    "regression": regression_loss,
}

METRICS = {"classification": ("accuracy", "loss"), "regression": ("rmse", "mse")}
"""Metrics of a task; the first is the one that counts."""

HIGHER_IS_BETTER = {"accuracy": True, "loss": False, "rmse": False, "mse": False}


def sample_metrics(task: str, output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Of every sample. A prediction that is not a number is wrong, by any measure."""
    loss = LOSSES[task](output, target)
    loss = torch.where(loss.isnan(), torch.inf, loss)
    if task == "classification":
        return {"loss": loss, "accuracy": (output.argmax(-1) == target) & ~output.isnan().any(-1)}
    return {"mse": loss, "rmse": loss}
