"""Metrics by name, of each task.

Metrics of a whole split are scikit-learn's where it has them. Means over samples (accuracy, losses, errors) are written
here: they are computed for a stack of clients at once, where scikit-learn takes one client at a time. For 200 clients
of 50 samples and 10 classes it needs 195 times (log loss) and 257 times (accuracy) as long.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.task import (
    IGNORED,
    Metric,
    Quantile,
    Task,
    hits,
    regression_loss,
    token_losses,
    usual_metrics,
    with_infinity,
)
from fedtailor.core.trees import Tree, wide
from fedtailor.errors import ConfigError, nearest
from fedtailor.metrics import overlap
from fedtailor.plugins import import_object

ONE_CLASS = "its samples have one class only"
NO_TOKEN = "none of its tokens counts"
Scores = NDArray[np.float64]


def metrics_of(task: Task, names: Sequence[str] = (), decide: str = "") -> tuple[Metric, ...]:
    """The metrics of a task that are asked for, or its usual ones; the one that decides comes first."""
    chosen = {name: find(task, name) for name in names or task.metrics}
    if decide and decide not in chosen:
        chosen[decide] = find(task, decide)
    first = decide or next(iter(chosen))
    return chosen[first], *(metric for name, metric in chosen.items() if name != first)


def find(task: Task, name: str) -> Metric:
    """A metric of a task by its name, or one's own "module:function" of outputs and targets."""
    if ":" in name:
        return _own(name)
    known = known_metrics(task)
    if name.startswith("top_") and name[4:].isdecimal() and "accuracy" in known:
        k = int(name[4:])
        return Metric(name, True, lambda o, y: _in_top(o, y, k), worst=0.0)
    if name in known:
        if name == "hausdorff_95":
            overlap.require_monai()
        return known[name]
    options = [*known, "top_3"] if task.kind == "classification" else known
    hint = f'{nearest(name, options)} (own metrics: "package.module:function")'
    needs = _elsewhere(name)
    raise ConfigError(f'evaluation: {task.name} has no metric "{name}"{needs}; {hint}')


def known_metrics(task: Task) -> dict[str, Metric]:
    usual = {m.name: m for m in usual_metrics(task)}
    if task.kind == "classification":
        return usual | _of_classes()
    if task.kind == "multilabel":
        return usual | _of_labels()
    if isinstance(task, Quantile):
        return usual | _of_quantiles(task)
    if task.kind == "regression":
        return usual | _of_numbers()
    if task.kind == "count":
        return usual | _of_counts()
    if task.kind == "survival":
        return usual | {"c_index": Metric("c_index", True, of_all=c_index, worst=0.0, missing="no pair can be ordered")}
    if task.kind == "segmentation":
        return usual | _of_masks(task)
    if task.kind == "tokens":
        return usual | {
            "accuracy": Metric("accuracy", True, _right_tokens, weight=_tokens, worst=0.0, missing=NO_TOKEN),
            "perplexity": Metric(
                "perplexity",
                False,
                with_infinity(lambda o, y: wide(token_losses(o, y)).sum(-1)),
                torch.exp,
                weight=_tokens,
                missing=NO_TOKEN,
            ),
        }
    return usual


def _elsewhere(name: str) -> str:
    if name in _of_classes() and name not in _of_numbers():
        return ", which needs probabilities of classes"
    return ", which is for numbers" if name in _of_numbers() else ""


def _own(name: str) -> Metric:
    function = import_object("evaluation.metrics", name)
    direction = getattr(function, "higher_is_better", None)
    if not callable(function) or not isinstance(direction, bool):
        short = name.partition(":")[2]
        raise ConfigError(
            f'evaluation.metrics: "{name}" must be a function of outputs and targets that says which way is better: '
            f"{short}.higher_is_better = True or False"
        )
    worst = -math.inf if direction else math.inf
    if getattr(function, "per_sample", False):
        return Metric(name, direction, function, worst=worst)
    return Metric(name, direction, of_all=function, worst=worst)


def _score(name: str) -> Callable[..., float]:
    """A function of scikit-learn's, which takes half a second to import: most runs need none of them."""

    def score(*arguments: Any, **options: Any) -> float:
        from sklearn import metrics

        return float(getattr(metrics, name)(*arguments, **options))

    return score


def _of_classes() -> dict[str, Metric]:
    def labels(score: Callable[..., float], **options: Any) -> Callable[[Tensor, Tensor], float]:
        return lambda o, y: score(y.numpy(), o.argmax(-1).numpy(), **options)

    return {
        "accuracy": Metric("accuracy", True, hits, worst=0.0),
        "balanced_accuracy": Metric(
            "balanced_accuracy", True, of_all=_quiet(labels(_score("balanced_accuracy_score"))), worst=0
        ),
        "macro_f1": Metric(
            "macro_f1", True, of_all=_quiet(labels(_score("f1_score"), average="macro", zero_division=0)), worst=0
        ),
        "auroc": Metric("auroc", True, of_all=_by_class(_score("roc_auc_score")), worst=0.0, missing=ONE_CLASS),
        "average_precision": Metric(
            "average_precision", True, of_all=_by_class(_score("average_precision_score")), worst=0.0, missing=ONE_CLASS
        ),
        "log_loss": Metric("log_loss", False, with_infinity(_log_loss)),
        "brier": Metric("brier", False, with_infinity(_brier)),
        "calibration_error": Metric("calibration_error", False, of_all=calibration_error),
    }


def _of_labels() -> dict[str, Metric]:
    def f1(o: Tensor, y: Tensor) -> float:
        return float(_score("f1_score")(y.numpy(), (o > 0).numpy(), average="macro", zero_division=0))

    def each(score: Callable[..., float]) -> Callable[[Tensor, Tensor], float]:
        """Mean over the labels that some samples have and some have not."""
        return lambda o, y: _mean_of_columns(score, y.numpy(), o.sigmoid().double().numpy())

    missing = "every label is at all of its samples or at none"
    return {
        "accuracy": Metric("accuracy", True, lambda o, y: ((o > 0) == (y > 0)).double().mean(-1), worst=0.0),
        "macro_f1": Metric("macro_f1", True, of_all=_quiet(f1), worst=0.0),
        "auroc": Metric("auroc", True, of_all=each(_score("roc_auc_score")), worst=0.0, missing=missing),
        "average_precision": Metric(
            "average_precision", True, of_all=each(_score("average_precision_score")), worst=0.0, missing=missing
        ),
        "log_loss": Metric(
            "log_loss",
            False,
            with_infinity(
                lambda o, y: torch.nn.functional.binary_cross_entropy_with_logits(o, y, reduction="none").mean(-1)
            ),
        ),
        "brier": Metric("brier", False, with_infinity(lambda o, y: (o.sigmoid() - y).square().mean(-1))),
    }


def _of_numbers() -> dict[str, Metric]:
    squares = with_infinity(regression_loss)

    def r2(o: Tensor, y: Tensor) -> float:
        if len(y) < 2 or not bool((y != y[0]).any()):
            return math.nan
        return float(_score("r2_score")(y.numpy(), o.numpy()))

    return {
        "rmse": Metric("rmse", False, squares, torch.sqrt),
        "mse": Metric("mse", False, squares),
        "mae": Metric("mae", False, with_infinity(lambda o, y: (o - y).abs().mean(-1))),
        "r2": Metric("r2", True, of_all=r2, worst=-math.inf, missing="all its targets are the same"),
    }


def _of_counts() -> dict[str, Metric]:
    def rates(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return with_infinity(lambda o, y: of(o.double().exp(), y.double()))

    return {
        "rmse": Metric("rmse", False, rates(regression_loss), torch.sqrt),
        "mse": Metric("mse", False, rates(regression_loss)),
        "mae": Metric("mae", False, rates(lambda o, y: (o - y).abs().mean(-1))),
    }


def _of_quantiles(task: Quantile) -> dict[str, Metric]:
    middle = min(range(len(task.quantiles)), key=lambda i: abs(task.quantiles[i] - 0.5))

    def median(o: Tensor) -> Tensor:
        return o[..., middle : middle + 1]

    return {
        "pinball": Metric("pinball", False, with_infinity(task.loss)),
        "coverage": Metric(
            "coverage", True, lambda o, y: (o[..., 0] <= y[..., 0]) & (y[..., 0] <= o[..., -1]), worst=0
        ),
        "width": Metric("width", False, with_infinity(lambda o, y: o[..., -1] - o[..., 0])),
        "mae": Metric("mae", False, with_infinity(lambda o, y: (median(o) - y).abs().mean(-1))),
        "rmse": Metric("rmse", False, with_infinity(lambda o, y: regression_loss(median(o), y)), torch.sqrt),
    }


def _of_masks(task: Task) -> dict[str, Metric]:
    """Means over images: of each, the mean over the classes in its mask but 0, as in MONAI."""

    def each_alone(o: Tensor, y: Tensor) -> Tensor:
        return torch.stack([task.loss(o[i : i + 1], y[i : i + 1])[0] for i in range(len(y))])

    images: dict[str, Any] = {"weight": overlap.is_marked, "missing": "its masks have no class but 0"}
    return {
        "loss": Metric("loss", False, with_infinity(each_alone if task.mixes else task.loss)),
        "dice": Metric("dice", True, overlap.dice, worst=0.0, **images),
        "iou": Metric("iou", True, overlap.iou, worst=0.0, **images),
        "hausdorff_95": Metric("hausdorff_95", False, overlap.hausdorff_95, **images),
    }


def _by_class(score: Callable[..., float]) -> Callable[[Tensor, Tensor], float]:
    """Each class against the others, mean over the classes that are there; of two, the second."""

    def of(o: Tensor, y: Tensor) -> float:
        probabilities, target = o.double().softmax(-1).numpy(), y.numpy()
        if len(np.unique(target)) < 2:
            return math.nan
        if probabilities.shape[1] == 2:
            return float(score(target, probabilities[:, 1]))
        return _mean_of_columns(score, np.eye(probabilities.shape[1])[target], probabilities)

    return of


def _mean_of_columns(score: Callable[..., float], target: Scores, scores: Scores) -> float:
    known = [c for c in range(target.shape[1]) if 0 < target[:, c].sum() < len(target)]
    return float(np.mean([score(target[:, c], scores[:, c]) for c in known])) if known else math.nan


def _quiet(of: Callable[[Tensor, Tensor], float]) -> Callable[[Tensor, Tensor], float]:
    """Without warnings of classes that are predicted but absent, which are ordinary at a small client."""

    def quiet(o: Tensor, y: Tensor) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(of(o, y))

    return quiet


def _log_loss(o: Tensor, y: Tensor) -> Tensor:
    return -o.log_softmax(-1).gather(-1, y[:, None])[:, 0]


def _brier(o: Tensor, y: Tensor) -> Tensor:
    """The squared distance of the probabilities from the label, summed over the classes."""
    return (o.softmax(-1) - torch.nn.functional.one_hot(y, o.shape[-1])).square().sum(-1)


def _in_top(o: Tensor, y: Tensor, k: int) -> Tensor:
    if k > o.shape[-1]:
        raise ConfigError(f'evaluation.metrics: "top_{k}": there are only {o.shape[-1]} classes')
    return (o.topk(k, dim=-1).indices == y[:, None]).any(-1) & ~o.isnan().any(-1)


def calibration_error(o: Tensor, y: Tensor, bins: int = 15) -> float:
    """How far the confidence in the likeliest class is from how often it is right: by bins of equal width."""
    confidence, label = o.double().softmax(-1).max(-1)
    at = (confidence * bins).long().clamp(max=bins - 1)
    gap = confidence.new_zeros(bins).index_add_(0, at, confidence - (label == y).double())
    return float(gap.abs().sum() / len(y))


def c_index(o: Tree, y: Tensor) -> float:
    """Share of the pairs, of which one is known to have come first, that the risks put in this order (Harrell's C)."""
    risk, (time, event) = o[..., 0].double(), y.double().unbind(-1)
    ahead = pairs = risk.new_zeros(())
    for i in torch.nonzero(event)[:, 0].tolist():
        later = (time > time[i]) | ((time == time[i]) & (event == 0))
        ahead = ahead + (risk[i] > risk[later]).sum() + 0.5 * (risk[i] == risk[later]).sum()
        pairs = pairs + later.sum()
    return float(ahead / pairs) if pairs else math.nan


def _tokens(y: Tensor) -> Tensor:
    return (y != IGNORED).sum(-1)


def _right_tokens(o: Tensor, y: Tensor) -> Tensor:
    return (hits(o, y) & (y != IGNORED)).sum(-1)
