"""How well masks agree with the truth: Dice, intersection over union and distance of the outlines, of each image."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from fedtailor.core.segmentation import VOID, mask_of
from fedtailor.errors import ConfigError


def is_marked(target: Tensor) -> Tensor:
    """Whether an image has a class but 0; others do not count."""
    return ((target != 0) & (target != VOID)).flatten(1).any(1)


def dice(output: Tensor, target: Tensor) -> Tensor:
    """2 |P and T| / (|P| + |T|), mean over the classes of the mask but 0."""
    return _mean_over_classes(output, target, lambda both, p, t: 2 * both / (p + t))


def iou(output: Tensor, target: Tensor) -> Tensor:
    """|P and T| / |P or T|, mean over the classes of the mask but 0."""
    return _mean_over_classes(output, target, lambda both, p, t: both / (p + t - both))


def _mean_over_classes(output: Tensor, target: Tensor, score: Callable[..., Tensor]) -> Tensor:
    predicted, counts = mask_of(output), target != VOID
    total = torch.zeros(len(target), dtype=torch.float32, device=target.device)
    classes = torch.zeros_like(total)
    for number in range(1, max(2, output.shape[1])):
        p, t = (predicted == number) & counts, target == number
        sizes = [v.flatten(1).sum(1).to(total.dtype) for v in (p & t, p, t)]
        total += torch.where(sizes[2] > 0, score(*sizes), 0.0)
        classes += sizes[2] > 0
    is_number = ~output.isnan().flatten(1).any(1)
    return torch.where(is_number, total / classes.clamp(min=1), 0.0)


def hausdorff_95(output: Tensor, target: Tensor) -> Tensor:
    """Distance of the outlines that 95 % of their points keep, in pixels, mean over the classes of the mask but 0.

    Of a class that was not found, the diagonal of the image.
    """
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance

    diagonal = math.hypot(*target.shape[1:])
    predicted = torch.where(target == VOID, 0, mask_of(output)).cpu()
    target = torch.where(target == VOID, 0, target).cpu()
    values = []
    for p, t in zip(predicted, target, strict=True):
        present = t.unique()[t.unique() > 0]
        if not len(present):
            values.append(output.new_zeros((), device="cpu"))
            continue
        found, true = ((v == present.reshape(-1, *[1] * v.dim())).float()[None] for v in (p, t))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that were not found
            distance = compute_hausdorff_distance(found, true, include_background=True, percentile=95)
        values.append(torch.where(distance.isfinite(), distance, diagonal).mean())
    distances = torch.stack(values).to(output.device, torch.float32)
    return torch.where(output.isnan().flatten(1).any(1), torch.inf, distances)


def require_monai() -> None:
    if find_spec("monai") is None:
        raise ConfigError(
            "evaluation.metrics: hausdorff_95 needs the package monai; pip install 'fedtailor[segmentation]'"
        )
