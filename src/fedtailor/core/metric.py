"""What is measured of a personal model, on all samples of a client's split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.task import Loss, Task, regression_loss
from fedtailor.core.trees import Tree


@dataclass(frozen=True)
class Metric:
    """Of a client's whole split: the mean of `per_sample`, finished, or where there is none a function of all."""

    name: str
    higher_is_better: bool
    per_sample: Loss | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    of_all: Callable[[Tree, Tensor], float] | None = None
    worst: float = torch.inf  # of predictions that are not numbers
    missing: str = "not a number"  # why a client with samples may have none


def bounded(loss: Loss) -> Loss:
    """The same loss; without limit where it is not a number."""

    def losses(outputs: Tree, target: Tensor) -> Tensor:
        values = loss(outputs, target)
        return torch.where(values.isnan(), torch.inf, values)

    return losses


def hits(output: Tensor, target: Tensor) -> Tensor:
    """Whether the largest output is the right one. A prediction that is not a number is wrong."""
    return (output.argmax(-1) == target) & ~output.isnan().any(-1)


def usual_metrics(task: Task) -> tuple[Metric, ...]:
    """Those of a task that are means over samples: what there is without the package `metrics`."""
    squares, loss = bounded(regression_loss), bounded(task.loss)
    known = {
        "loss": Metric("loss", False, None if task.mixes else loss, of_all=lambda o, y: float(loss(o, y).mean())),
        "accuracy": Metric("accuracy", True, hits, worst=0.0),
        "mse": Metric("mse", False, squares),
        "rmse": Metric("rmse", False, squares, torch.sqrt),
        "deviance": Metric("deviance", False, lambda o, y: 2 * loss(o, y)),
    }
    return tuple(known[name] for name in task.metrics if name in known)


METRICS = {"classification": ("accuracy", "loss"), "regression": ("rmse", "mse"), "count": ("deviance", "loss")}
HIGHER_IS_BETTER = {"accuracy": True, "loss": False, "rmse": False, "mse": False, "deviance": False}


def recorded_metrics(about: Mapping[str, Any]) -> dict[str, bool]:
    """Metrics of a run's record, the one that decides first, and whether higher is better; also of older records."""
    metrics: dict[str, bool] = about.get("metrics") or {m: HIGHER_IS_BETTER[m] for m in METRICS[about["task"]]}
    return metrics
