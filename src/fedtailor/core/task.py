"""What is learned: the loss of every sample, what a target looks like, and what is measured.

A task of one's own is any class with `kind`, `metrics` and `loss`; the other members have defaults here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.core.segmentation import Segmentation
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError, nearest
from fedtailor.plugins import import_object

Loss = Callable[[Tree, Tensor], Tensor]  # (outputs, targets) -> one number per sample
TargetKind = Literal["classification", "multilabel", "regression", "count", "survival", "tokens", "segmentation", "own"]
IGNORED = -100  # a token without a loss: padding


class Task(Protocol):
    """What is learned of samples with targets of some kind."""

    @property
    def kind(self) -> TargetKind:
        """The kind of targets, such as "classification"."""

    @property
    def name(self) -> str:
        """What algorithms are told, which may refuse it."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured unless others are asked for; the first decides."""

    @property
    def loss(self) -> Loss:
        """The loss of each sample, [rows]."""

    @property
    def mixes(self) -> bool:
        """Whether the loss of a sample depends on the others of its batch."""

    def outputs(self, columns: int) -> int:
        """How many numbers a model gives for so many classes, or columns of the target."""


def classification_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def regression_loss(output: Tensor, target: Tensor) -> Tensor:
    """Squared error of every sample, mean over the target columns."""
    _refuse_other_shape(output, target)
    return (output - target).square().mean(dim=-1)


@dataclass(frozen=True)
class Classification:
    """One class of several."""

    weights: tuple[float, ...] = ()  # of the classes; a batch's loss is the mean of the weighted ones
    smoothing: float = 0.0  # this share of every label is spread over all classes
    error: Literal["entropy", "squared"] = "entropy"  # or the squared distance of outputs from 0 and 1, mean over them
    kind: ClassVar[TargetKind] = "classification"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    mixes: ClassVar[bool] = False

    @property
    def name(self) -> str:
        if self.error == "squared":
            return "squared classification"
        return "classification" if self.loss is classification_loss else "weighted classification"

    @property
    def loss(self) -> Loss:
        if self.error == "squared":
            return self._squared
        if not (self.weights or self.smoothing):
            return classification_loss
        return self._loss

    def outputs(self, columns: int) -> int:
        if self.weights and len(self.weights) != columns:
            raise ValueError(f"weights: {len(self.weights)} numbers for {columns} classes")
        if not 0 <= self.smoothing < 1 or min(self.weights, default=0.0) < 0:
            raise ValueError("smoothing must be between 0 and 1, and weights not below 0")
        if self.error not in ("entropy", "squared"):
            raise ValueError(f'error = "{self.error}": entropy or squared')
        return columns

    def _squared(self, output: Tensor, target: Tensor) -> Tensor:
        wanted = F.one_hot(target, output.shape[-1]).to(output.dtype) * (1 - self.smoothing)
        weights = output.new_tensor(self.weights)[target] if self.weights else 1.0
        return weights * (output - wanted - self.smoothing / output.shape[-1]).square().mean(dim=-1)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        weights = output.new_tensor(self.weights) if self.weights else None
        return F.cross_entropy(output, target, weights, label_smoothing=self.smoothing, reduction="none")


@dataclass(frozen=True)
class Multilabel:
    """Any number of labels, each present or not."""

    weights: tuple[float, ...] = ()  # of a label that is present, against one that is not
    kind: ClassVar[TargetKind] = "multilabel"
    name: ClassVar[str] = "multilabel"
    metrics: ClassVar[tuple[str, ...]] = ("macro_f1", "accuracy", "loss")
    mixes: ClassVar[bool] = False

    def outputs(self, columns: int) -> int:
        if self.weights and len(self.weights) != columns:
            raise ValueError(f"weights: {len(self.weights)} numbers for {columns} labels")
        return columns

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        _refuse_other_shape(output, target)
        weights = output.new_tensor(self.weights) if self.weights else None
        losses = F.binary_cross_entropy_with_logits(output, target, pos_weight=weights, reduction="none")
        return losses.mean(dim=-1)


@dataclass(frozen=True)
class Regression:
    """One number, or several."""

    error: Literal["mse", "mae", "huber"] = "mse"
    delta: float = 1.0  # of huber: where the square ends
    kind: ClassVar[TargetKind] = "regression"
    metrics: ClassVar[tuple[str, ...]] = ("rmse", "mse")
    mixes: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "regression" if self.error == "mse" else f"{self.error} regression"

    @property
    def loss(self) -> Loss:
        return regression_loss if self.error == "mse" else self._loss

    def outputs(self, columns: int) -> int:
        if self.error not in ("mse", "mae", "huber"):
            raise ValueError(f'error = "{self.error}": mse, mae or huber')
        return columns

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        _refuse_other_shape(output, target)
        error = (output - target).abs()
        if self.error == "huber":
            error = torch.where(error < self.delta, error.square() / 2, self.delta * (error - self.delta / 2))
        return error.mean(dim=-1)


@dataclass(frozen=True)
class Count:
    """How often something happens: outputs are logarithms of rates, and counts around them are Poisson's."""

    kind: ClassVar[TargetKind] = "count"
    name: ClassVar[str] = "count"
    metrics: ClassVar[tuple[str, ...]] = ("deviance", "loss")
    mixes: ClassVar[bool] = False

    def outputs(self, columns: int) -> int:
        return columns

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Half the deviance, mean over the target columns: 0 where the rate is the count."""
        _refuse_other_shape(output, target)
        y = target.to(output.dtype)
        return (output.exp() - y + torch.xlogy(y, y) - y * output).mean(dim=-1)


@dataclass(frozen=True)
class Quantile:
    """Several quantiles of one number: an interval, and what lies in its middle."""

    quantiles: tuple[float, ...] = (0.05, 0.5, 0.95)
    kind: ClassVar[TargetKind] = "regression"
    name: ClassVar[str] = "quantile"
    metrics: ClassVar[tuple[str, ...]] = ("pinball", "coverage", "width")
    mixes: ClassVar[bool] = False

    def outputs(self, columns: int) -> int:
        if columns != 1:
            raise ValueError(f"for one target column, not {columns}")
        if list(self.quantiles) != sorted(set(self.quantiles)) or not all(0 < q < 1 for q in self.quantiles):
            raise ValueError("quantiles must rise and lie between 0 and 1")
        return len(self.quantiles)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The pinball loss, mean over the quantiles."""
        if target.shape[-1:] != (1,) or output.shape[:-1] != target.shape[:-1]:
            raise ValueError(f"outputs have shape {list(output.shape)}, targets {list(target.shape)}")
        error, levels = target - output, output.new_tensor(self.quantiles)
        return torch.maximum(levels * error, (levels - 1) * error).mean(dim=-1)


@dataclass(frozen=True)
class Survival:
    """How long until an event, which for some had not come when they were last seen: Cox's proportional hazards.

    Targets are [time, 1 if the event came]. The loss of a sample is its term of the partial likelihood (Breslow's),
    with those of its batch that were still at risk.
    """

    kind: ClassVar[TargetKind] = "survival"
    name: ClassVar[str] = "survival"
    metrics: ClassVar[tuple[str, ...]] = ("c_index", "loss")
    mixes: ClassVar[bool] = True

    def outputs(self, columns: int) -> int:
        return 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        risk, (time, event) = output.squeeze(-1), target.unbind(-1)
        at_risk = time[None, :] >= time[:, None]
        among = torch.where(at_risk, risk[None, :], -torch.inf).logsumexp(dim=-1)
        return event * (among - risk)


@dataclass(frozen=True)
class Tokens:
    """The next token at every place of a sequence; targets of -100 do not count."""

    kind: ClassVar[TargetKind] = "tokens"
    name: ClassVar[str] = "tokens"
    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "accuracy", "loss")
    mixes: ClassVar[bool] = False

    def outputs(self, columns: int) -> int:
        return columns

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean over the tokens of a sequence."""
        counts = target != IGNORED
        losses = F.cross_entropy(output.movedim(-1, 1), target, ignore_index=IGNORED, reduction="none")
        return losses.sum(-1) / counts.sum(-1).clamp(min=1)


TASKS: dict[str, type[Any]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "count": Count,
    "quantile": Quantile,
    "survival": Survival,
    "tokens": Tokens,
    "segmentation": Segmentation,
}


def find(name: str) -> type[Any]:
    """The class of a task by its name, or one's own."""
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise ConfigError(f'task.name: no task "{name}"; {nearest(name, TASKS)} (own tasks: "package.module:Class")')
    kind = import_object("task.name", name)
    if not isinstance(kind, type) or not all(hasattr(kind, part) for part in ("kind", "metrics", "loss")):
        raise ConfigError(f'task.name: "{name}" must be a class with kind, metrics and loss')
    return kind


def make(name: str, options: Mapping[str, Any]) -> Task:
    kind = find(name)
    known = [f.name for f in fields(kind) if f.init] if is_dataclass(kind) else []
    for key in options:
        if key not in known:
            hint = nearest(key, known) if known else "it has none"
            raise ConfigError(f'task.{key}: {name} has no option "{key}"; {hint}')
    task: Task = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    return task if name in TASKS else OwnTask(task, name)


@dataclass(frozen=True)
class OwnTask:
    """A task of the user's, with what it leaves out."""

    own: Any
    name: str
    kind: TargetKind = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.own.kind)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.own.metrics)

    @property
    def mixes(self) -> bool:
        return bool(getattr(self.own, "mixes", False))

    @property
    def loss(self) -> Loss:
        loss: Loss = self.own.loss
        return self._of_batch if self.mixes else loss

    def _of_batch(self, outputs: Tree, target: Tensor) -> Tensor:
        """A loss that depends on the batch may be one number for it, as torch's own are."""
        value: Tensor = self.own.loss(outputs, target)
        return value.expand(len(target)) if value.dim() == 0 else value

    def outputs(self, columns: int) -> int:
        return int(self.own.outputs(columns)) if hasattr(self.own, "outputs") else columns


def default_task(kind: str) -> Task:
    """What is learned from targets of a kind if nothing else is said."""
    if kind not in TASKS:
        raise ValueError(f'targets of kind "{kind}": task.name must say what is learned of them, as "module:Class"')
    task: Task = TASKS[kind]()
    return task


def _refuse_other_shape(output: Tensor, target: Tensor) -> None:
    if output.shape != target.shape:  # broadcasting would compare every sample with every other
        raise ValueError(f"outputs have shape {list(output.shape)}, targets {list(target.shape)}")


@dataclass(frozen=True)
class Metric:
    """Of a client's whole split: the mean of `per_sample`, finished, or where there is none a function of all.

    With a `weight`, `per_sample` is the sum over so many parts of a sample, such as tokens, and the mean is over these.
    """

    name: str
    higher_is_better: bool
    per_sample: Loss | None = None
    finish: Callable[[Tensor], Tensor] | None = None
    weight: Callable[[Tensor], Tensor] | None = None  # targets -> parts of each sample
    of_all: Callable[[Tree, Tensor], float] | None = None
    worst: float = torch.inf  # of predictions that are not numbers
    missing: str = "not a number"  # why a client with samples may have none


def token_losses(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of every token, 0 where it does not count; [rows, tokens]."""
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.reshape(target.shape)


def with_infinity(loss: Loss) -> Loss:
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
    squares, loss = with_infinity(regression_loss), with_infinity(task.loss)
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
