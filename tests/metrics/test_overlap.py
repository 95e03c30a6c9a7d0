"""Dice, intersection over union and Hausdorff distance of masks: by hand, and as MONAI has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.core.segmentation import VOID, mask_of
from fedtailor.core.task import default_task
from fedtailor.metrics import overlap
from fedtailor.metrics.library import metrics_of


def outputs_of(mask: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(mask.long(), classes).movedim(-1, 1).float()


def test_by_hand() -> None:
    true = torch.tensor([[[0, 1, 1, 2]], [[0, 0, 0, 0]], [[1, 1, VOID, 0]]], dtype=torch.uint8)
    found = outputs_of(torch.tensor([[[1, 1, 0, 2]], [[0, 1, 0, 0]], [[1, 0, 1, 0]]]), 3)
    assert overlap.is_marked(true).tolist() == [True, False, True]
    assert overlap.dice(found, true).tolist() == pytest.approx([(2 / 4 + 2 / 2) / 2, 0, 2 / 3])
    assert overlap.iou(found, true).tolist() == pytest.approx([(1 / 3 + 1) / 2, 0, 1 / 2])
    found[0, 0, 0, 0] = torch.nan
    assert overlap.dice(found, true)[0] == 0


def test_they_are_usual_and_streamed() -> None:
    """None of them needs all outputs of a split."""
    found = metrics_of(default_task("segmentation"), ("dice", "iou", "loss"))
    assert [m.name for m in metrics_of(default_task("segmentation"))] == ["dice", "loss"]
    assert all(m.per_sample is not None and m.of_all is None for m in found)


@pytest.mark.parametrize("shape", [(3, 2, 12, 10), (2, 4, 6, 8, 7), (3, 1, 9, 9)])
@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy.*:FutureWarning", "ignore:the ground truth of class")
def test_as_in_monai(shape: tuple[int, ...]) -> None:
    metrics: Any = pytest.importorskip("monai.metrics", reason="needs MONAI, of the extra segmentation")
    torch.manual_seed(0)
    output, classes = torch.randn(shape), max(2, shape[1])
    true = torch.randint(0, classes, (shape[0], *shape[2:]), dtype=torch.uint8)
    true[0][true[0] == 1] = 0  # a class that is missing in one image
    for kind, ours in (
        (metrics.DiceMetric(include_background=False), overlap.dice),
        (metrics.MeanIoU(include_background=False), overlap.iou),
        (metrics.HausdorffDistanceMetric(include_background=False, percentile=95), overlap.hausdorff_95),
    ):
        kind(outputs_of(mask_of(output), classes), outputs_of(true, classes))
        marked = overlap.is_marked(true)
        assert float(ours(output, true)[marked].mean()) == pytest.approx(kind.aggregate().item(), abs=1e-6)


def test_a_class_that_is_not_found_is_as_far_as_the_diagonal() -> None:
    pytest.importorskip("monai.metrics", reason="needs MONAI, of the extra segmentation")
    true = torch.zeros(2, 3, 4, dtype=torch.uint8)
    true[:, 1, 1] = 1
    found = outputs_of(torch.stack([torch.zeros(3, 4), true[1]]), 2)
    assert overlap.hausdorff_95(found, true).tolist() == [5.0, 0.0]
    found[1] = torch.nan
    assert overlap.hausdorff_95(found, true)[1] == torch.inf
