"""The U-Net: its size, images of any size, and no image that depends on another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedtailor.errors import ConfigError
from fedtailor.models import build
from fedtailor.models.unet import UNet, fold_space, unfold_space


def test_parameters_are_counted() -> None:
    """Kernels of 9 and two numbers of a norm for each convolution, and the last layer."""
    net = UNet((3, 32, 32), 2, channels=(4, 8), convolutions=1)
    convolutions = 9 * (3 * 4 + 4 * 8 + (8 + 4) * 4) + 2 * (4 + 8 + 4)
    assert sum(v.numel() for v in net.parameters()) == convolutions + 4 * 2 + 2
    twice = UNet((3, 32, 32), 2, channels=(4, 8), convolutions=2)
    more = 9 * (4 * 4 + 8 * 8 + 4 * 4) + 2 * (4 + 8 + 4)
    assert sum(v.numel() for v in twice.parameters()) == convolutions + more + 4 * 2 + 2


@pytest.mark.parametrize("fold", [1, 2])
@pytest.mark.parametrize("space", [(16, 16), (7, 11), (8, 8, 8), (5, 6, 9)])
def test_outputs_are_as_large_as_images_of_any_size(space: tuple[int, ...], fold: int) -> None:
    net = UNet((2, *[8] * len(space)), 3, channels=(4, 8, 8), convolutions=1, fold=fold)
    assert net(torch.zeros(2, 2, *space)).shape == (2, 3, *space)


@pytest.mark.parametrize("space", [(6, 8), (5, 7), (4, 6, 2), (3, 5, 4)])
def test_folding_and_back_loses_nothing(space: tuple[int, ...]) -> None:
    x = torch.arange(2.0 * 3 * torch.Size(space).numel()).reshape(2, 3, *space)
    folded = fold_space(x, 2)
    assert folded.shape == (2, 3 * 2 ** len(space), *((n + 1) // 2 for n in space))
    assert torch.equal(unfold_space(folded, 2, space), x)
    if space == (6, 8):
        assert torch.equal(folded, torch.nn.functional.pixel_unshuffle(x, 2))


def test_instance_norm_does_not_mix_images_and_is_instance_norm() -> None:
    torch.manual_seed(0)
    net = UNet((1, 8, 8), 2, channels=(4, 8))
    x = torch.randn(3, 1, 8, 8)
    assert torch.allclose(net(x)[:1], net(x[:1]), atol=1e-6)
    norm = next(m for m in net.modules() if isinstance(m, nn.GroupNorm))
    features = torch.randn(2, 4, 5, 5)
    assert torch.allclose(norm(features), nn.functional.instance_norm(features), atol=1e-6)


def test_by_name_with_its_head_and_options() -> None:
    model = build("unet", (1, 8, 8), 2, seed=0, options={"channels": [4, 8], "norm": "batch"})
    assert sorted(model.head) == ["out.bias", "out.weight"]
    assert model.batch_statistics
    wrong: list[dict[str, Any]] = [{"norm": "layer"}, {"channels": []}, {"channels": [0]}, {"fold": 0}]
    for options in wrong:
        with pytest.raises(ConfigError, match=r"model"):
            build("unet", (1, 8, 8), 2, seed=0, options=options)
    with pytest.raises(ConfigError, match="images"):
        build("unet", (8,), 2, seed=0)
