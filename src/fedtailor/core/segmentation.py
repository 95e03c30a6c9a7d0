"""Segmentation: a class for every pixel or voxel of an image, its loss, and how the mask is read off the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.errors import ConfigError
from fedtailor.plugins import import_object

VOID = 255  # in a mask: what is here does not count
SMOOTH = 1e-5  # as in MONAI


def class_scores(output: Tensor) -> Tensor:
    """[rows, classes, ...]; a single output is the logit of the second of two classes."""
    return output if output.shape[1] > 1 else torch.cat([torch.zeros_like(output), output], dim=1)


def mask_of(output: Tensor) -> Tensor:
    """[rows, ...]: the likeliest class of every pixel or voxel."""
    return (output[:, 0] > 0).long() if output.shape[1] == 1 else output.argmax(1)


@dataclass(frozen=True)
class Segmentation:
    """A class for every pixel or voxel. Masks are uint8 [rows, (depth,) height, width]; 255 does not count.

    Outputs are [rows, classes, (depth,) height, width]; for two classes one output is enough, the logit of the second.
    """

    cross_entropy: float = 1.0  # its weight in the loss
    dice: float = 1.0  # that of soft Dice, 1 - 2 |P and T| / (|P| + |T|), mean over the classes
    background: bool = True  # whether soft Dice counts class 0, too
    weights: tuple[float, ...] = ()  # of the classes in the cross-entropy
    criterion: str = ""  # in place of these: a loss such as "monai.losses:DiceCELoss"
    criterion_options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # what it is made with
    kind: ClassVar[Literal["segmentation"]] = "segmentation"
    name: ClassVar[str] = "segmentation"
    metrics: ClassVar[tuple[str, ...]] = ("dice", "loss")
    _criterion: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_criterion", _made(self.criterion, self.criterion_options))

    @property
    def mixes(self) -> bool:
        """A criterion that reduces a batch to one number."""
        return bool(self.criterion) and getattr(self._criterion, "reduction", "mean") != "none"

    def outputs(self, columns: int) -> int:
        if self.weights and len(self.weights) != columns:
            raise ValueError(f"weights: {len(self.weights)} numbers for {columns} classes")
        if min(self.cross_entropy, self.dice) < 0 or self.cross_entropy + self.dice == 0:
            raise ValueError("cross_entropy and dice must not be below 0, nor both be 0")
        return columns

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Of each image; where a criterion gives one number for the batch, this number for each."""
        if output.dim() != target.dim() + 1 or output.shape[2:] != target.shape[1:]:
            raise ValueError(f"outputs have shape {list(output.shape)}, masks {list(target.shape)}")
        if self._criterion is None:
            return self._entropy_and_dice(class_scores(output), target)
        value: Tensor = self._criterion(output, _as_wanted(self._criterion, output, target))
        return value.expand(len(output)) if value.dim() == 0 else value.flatten(1).mean(1) if value.dim() > 1 else value

    def _entropy_and_dice(self, scores: Tensor, target: Tensor) -> Tensor:
        classes, space = scores.shape[1], tuple(range(2, scores.dim()))
        numbers = torch.arange(classes, device=scores.device).reshape(1, -1, *[1] * len(space))
        truth = (target[:, None] == numbers).to(scores.dtype)  # nothing where the mask is void
        logs = scores.log_softmax(1)
        total = scores.new_zeros(len(scores))
        if self.cross_entropy:
            weighed = truth.sum(space) * (scores.new_tensor(self.weights) if self.weights else 1)
            entropies = -(truth * logs).sum(space) * (scores.new_tensor(self.weights) if self.weights else 1)
            total = total + self.cross_entropy * entropies.sum(1) / weighed.sum(1).clamp(min=SMOOTH)
        if self.dice:
            found = logs.exp() * (target != VOID)[:, None]
            both, each = (found * truth).sum(space), found.sum(space) + truth.sum(space)
            overlap = (2 * both + SMOOTH) / (each + SMOOTH)
            total = total + self.dice * (1 - overlap[:, 0 if self.background else 1 :]).mean(1)
        return total


def _made(name: str, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A loss from a class with its options, or a function."""
    if not name:
        return None
    if ":" not in name:
        raise ConfigError(f'task.criterion: "{name}" must be "package.module:Class", such as "monai.losses:DiceCELoss"')
    kind: Any = import_object("task.criterion", name)
    if not isinstance(kind, type):
        if options:
            raise ConfigError(f"task.criterion_options: {name} is a function; options are for classes")
        function: Callable[..., Any] = kind
        return function
    try:
        made: Callable[..., Any] = kind(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.criterion: {name} cannot be made with these options: {error}") from None
    return made


def _as_wanted(criterion: Any, output: Tensor, target: Tensor) -> Tensor:
    """Masks as losses take them: MONAI's with a channel, others without; of a single output, numbers of its shape."""
    if output.shape[1] == 1:
        return target[:, None].to(output.dtype)
    numbers = target.long()
    numbers = torch.where(numbers == VOID, -100, numbers)  # what torch's cross-entropy leaves out
    return numbers[:, None] if type(criterion).__module__.startswith("monai.") else numbers
