"""The loss of masks, against the same written pixel by pixel, and windows of large images."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from fedtailor.core import task as tasks
from fedtailor.core.segmentation import VOID, Segmentation, class_scores, mask_of
from fedtailor.core.windows import predict_in_windows
from fedtailor.errors import ConfigError


def by_hand(output: Tensor, mask: Tensor, smooth: float = 1e-5) -> tuple[float, float]:
    """Cross-entropy and soft Dice of one image [classes, pixels], [pixels]."""
    classes, pixels = output.shape
    p = [
        [math.exp(output[c, i]) / sum(math.exp(v) for v in output[:, i]) for i in range(pixels)] for c in range(classes)
    ]
    known = [i for i in range(pixels) if mask[i] != VOID]
    entropy = -sum(math.log(p[int(mask[i])][i]) for i in known) / len(known)
    overlaps = []
    for c in range(classes):
        both = sum(p[c][i] for i in known if mask[i] == c)
        each = sum(p[c][i] for i in known) + sum(1 for i in known if mask[i] == c)
        overlaps.append((2 * both + smooth) / (each + smooth))
    return entropy, 1 - sum(overlaps) / classes


@pytest.mark.parametrize("space", [(4, 3), (2, 3, 2)])
def test_entropy_and_dice_are_those_of_the_pixels_and_void_ones_do_not_count(space: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    output = torch.randn(2, 3, *space, dtype=torch.float64)
    mask = torch.randint(0, 3, (2, *space)).to(torch.uint8)
    mask[1].view(-1)[:5] = VOID
    wanted = [by_hand(o.flatten(1), m.flatten()) for o, m in zip(output, mask, strict=True)]
    both = Segmentation().loss(output, mask)
    assert both.tolist() == pytest.approx([e + d for e, d in wanted], abs=1e-9)
    assert Segmentation(dice=0.0).loss(output, mask).tolist() == pytest.approx([e for e, _ in wanted], abs=1e-9)
    weighed = Segmentation(cross_entropy=0.5, dice=2.0).loss(output, mask)
    assert weighed.tolist() == pytest.approx([0.5 * e + 2 * d for e, d in wanted], abs=1e-9)


def test_one_output_is_the_logit_of_the_second_class() -> None:
    torch.manual_seed(0)
    logit, mask = torch.randn(3, 1, 4, 4), torch.randint(0, 2, (3, 4, 4)).to(torch.uint8)
    two = torch.cat([torch.zeros_like(logit), logit], dim=1)
    assert torch.equal(class_scores(logit), two)
    assert torch.equal(mask_of(logit), mask_of(two))
    assert torch.allclose(Segmentation().loss(logit, mask), Segmentation().loss(two, mask))


def test_a_criterion_of_torch_is_used_as_it_is() -> None:
    torch.manual_seed(0)
    output, mask = torch.randn(3, 2, 4, 4), torch.randint(0, 2, (3, 4, 4)).to(torch.uint8)
    whole = tasks.make("segmentation", {"criterion": "torch.nn:CrossEntropyLoss"})
    each = tasks.make(
        "segmentation", {"criterion": "torch.nn:CrossEntropyLoss", "criterion_options": {"reduction": "none"}}
    )
    assert (whole.mixes, each.mixes) == (True, False)
    mean = torch.nn.functional.cross_entropy(output, mask.long())
    assert torch.allclose(whole.loss(output, mask), mean.expand(3))  # one number of the batch, for each of its images
    assert each.loss(output, mask).shape == (3,)
    assert torch.allclose(each.loss(output, mask).mean(), mean)
    mask[0] = VOID
    known = torch.nn.functional.cross_entropy(output[1:], mask[1:].long())
    assert torch.allclose(whole.loss(output, mask), known.expand(3))
    one = tasks.make("segmentation", {"criterion": "torch.nn:BCEWithLogitsLoss"})
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(output[1:, :1], mask[1:, None].float())
    assert torch.allclose(one.loss(output[1:, :1], mask[1:]), wanted.expand(2))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="criterion"):
        tasks.make("segmentation", {"criterion": "torch.nn:CrossEntropyLoss", "criterion_options": {"bg": 1}})
    with pytest.raises(ConfigError, match=r"criterion.*antigravity"):  # nothing is imported that trust does not ask for
        tasks.make("segmentation", {"criterion": "antigravity"})
    assert "antigravity" not in sys.modules
    with pytest.raises(ConfigError, match="background"):
        tasks.make("segmentation", {"backgrond": False})
    with pytest.raises(ValueError, match="weights"):
        Segmentation(weights=(1.0,)).outputs(2)
    with pytest.raises(ValueError, match="cross_entropy"):
        Segmentation(cross_entropy=0.0, dice=0.0).outputs(2)
    with pytest.raises(ValueError, match="masks"):
        Segmentation().loss(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 5, dtype=torch.uint8))


@pytest.mark.parametrize("size", [(9, 7), (4, 4), (3, 8), (13, 4)])
def test_windows_of_a_pointwise_model_give_what_the_whole_gives(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(2, 3, 1)
    x = torch.randn(2, 2, *size)
    with torch.no_grad():
        found = predict_in_windows(model, x, (4, 4))
        assert isinstance(found, Tensor)
        assert torch.allclose(found, model(x), atol=1e-6)


def test_overlapping_windows_are_averaged_also_of_stacked_models() -> None:
    """Windows of 4 begin 3 pixels apart, the last at the end: here at 0 and 1."""
    x = torch.arange(10.0).reshape(2, 1, 5, 1).expand(2, 1, 5, 4).contiguous()

    def sums(x: Tensor) -> Tensor:
        return x.sum((2, 3), keepdim=True).expand_as(x)

    found = predict_in_windows(sums, x, (4, 4))
    assert isinstance(found, Tensor)
    first, second = 4 * (0 + 1 + 2 + 3), 4 * (1 + 2 + 3 + 4)
    assert found[0, 0, :, 0].tolist() == [first, *[(first + second) / 2] * 3, second]
    factors = torch.tensor([1.0, 2.0])
    stacked = torch.func.vmap(lambda f: predict_in_windows(lambda v: f * sums(v), x, (4, 4)))(factors)
    assert torch.allclose(stacked, torch.stack([found, 2 * found]))


def test_windows_are_for_images_of_their_dimensions() -> None:
    with pytest.raises(ConfigError, match="window"):
        predict_in_windows(lambda x: x, torch.zeros(1, 1, 4, 4), (2, 2, 2))
