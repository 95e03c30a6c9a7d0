"""Corruptions: each changes images within their range, by the seed, and more so with severity."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn  # type: ignore[import-untyped]
from scipy.ndimage import convolve, gaussian_filter  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.data import load
from fedtailor.data.configs import Cifar10Config, Corruption, DigitsConfig, PartitionConfig
from fedtailor.data.corruptions import KINDS, LUMINANCE, corrupt, corrupt_clients
from fedtailor.errors import DataError
from tests.helpers import assert_equal


def pictures(count: int = 12, channels: int = 3, side: int = 32) -> Tensor:
    """Smooth shapes in colours, with some detail, as photographs have them."""
    rng = stream("pictures")
    rough = torch.from_numpy(rng.random((count, channels, 5, 5)))
    fine = torch.from_numpy(rng.random((count, channels, side, side)))
    smooth = torch.nn.functional.interpolate(rough, size=(side, side), mode="bicubic", align_corners=True)
    return (0.1 + 0.75 * smooth + 0.1 * fine).clamp(0, 1).float()


def change(kind: str, severity: int, x: Tensor) -> float:
    return (corrupt(x, kind, severity, stream("noise")) - x).abs().mean().item()


def federation(images: Tensor, clients: int = 4, mean: float = 0.5, sd: float = 0.5) -> FederatedData:
    """Clients that hold the same images in every split."""
    each = len(images)
    rows = Rows(
        ((images - mean) / sd).repeat(clients, 1, 1, 1),
        torch.zeros(clients * each, dtype=torch.int64),
        torch.arange(clients + 1) * each,
    )
    names = tuple(f"client-{i}" for i in range(clients))
    return FederatedData("made", "classification", names, rows, rows, rows, 2)


def test_all_kinds_can_be_configured() -> None:
    assert get_args(Corruption) == ("mixed", *KINDS)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_each_changes_images_within_their_range(kind: str, severity: int) -> None:
    x = pictures()
    before = x.clone()
    out = corrupt(x, kind, severity, stream("noise"))
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert 0 <= out.min() <= out.max() <= 1
    assert bool(((out - x).flatten(1).abs().amax(1) > 1e-3).all())
    assert torch.equal(x, before)
    assert torch.equal(out, corrupt(x, kind, severity, stream("noise")))
    drawn = not torch.equal(out, corrupt(x, kind, severity, stream("other noise")))
    assert drawn == kind.endswith("-noise")


@pytest.mark.parametrize("kind", KINDS)
def test_severities_grow(kind: str) -> None:
    changes = [change(kind, severity, pictures()) for severity in range(1, 6)]
    ordered = [changes[:2], changes[2:]] if kind == "saturate" else [changes]  # less colour, then more
    for part in ordered:
        assert part == sorted(part)
        assert len(set(part)) == len(part)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "saturate"])
@pytest.mark.parametrize("side", [8, 28])
def test_grey_images_of_other_sizes(kind: str, side: int) -> None:
    x = pictures(3, 1, side)
    out = corrupt(x, kind, 5, stream("noise"))
    assert out.shape == x.shape
    assert change(kind, 5, x) > 1e-3
    assert 0 <= out.min() <= out.max() <= 1


def test_noises_have_the_spread_of_their_constants() -> None:
    x = torch.full((20, 3, 32, 32), 0.5, dtype=torch.float64)
    spreads = {"gaussian-noise": 0.1, "speckle-noise": 0.2 * 0.5, "shot-noise": (0.5 / 50) ** 0.5}
    for kind, spread in spreads.items():
        out = corrupt(x, kind, 5, stream("noise"))
        assert out.std().item() == pytest.approx(spread, rel=0.02)
        assert out.mean().item() == pytest.approx(0.5, abs=0.003)
    out = corrupt(x, "impulse-noise", 5, stream("noise"))
    for value in (0, 1):
        assert (out == value).double().mean().item() == pytest.approx(0.035, rel=0.05)
    assert (out == 0.5).double().mean().item() == pytest.approx(0.93, rel=0.01)


def test_blurs_are_those_of_scipy() -> None:
    x = pictures(2).double()
    wanted = gaussian_filter(x.numpy(), sigma=(0, 0, 1.0, 1.0), mode="nearest")
    assert_equal({"x": corrupt(x, "gaussian-blur", 5, stream())}, {"x": torch.from_numpy(wanted)}, tolerance=1e-12)
    # severity 5: a disk of radius 1.5 is a square of nine pixels, blurred by next to nothing
    wanted = convolve(x.numpy(), np.full((1, 1, 3, 3), 1 / 9), mode="mirror")
    assert_equal({"x": corrupt(x, "defocus-blur", 5, stream())}, {"x": torch.from_numpy(wanted)}, tolerance=1e-12)


def test_values_by_hand() -> None:
    def pixel(*rgb: float) -> Tensor:
        return torch.tensor(rgb, dtype=torch.float64).reshape(1, 3, 1, 1)

    def after(kind: str, severity: int, *rgb: float) -> list[float]:
        return [round(v, 9) for v in corrupt(pixel(*rgb), kind, severity, stream()).flatten().tolist()]

    assert after("brightness", 2, 0.5, 0.25, 0.0) == [0.6, 0.3, 0.0]
    assert after("brightness", 5, 0.8, 0.4, 0.4) == [1.0, 0.5, 0.5]
    assert after("brightness", 1, 0.0, 0.0, 0.0) == [0.05] * 3
    assert after("saturate", 2, 0.8, 0.4, 0.6) == [0.8, 0.76, 0.78]
    assert after("saturate", 4, 0.8, 0.6, 0.7) == [0.8, 0.32, 0.56]  # saturation 0.25 becomes 0.6
    assert after("saturate", 5, 0.5, 0.5, 0.5) == [0.5, 0.4, 0.4]
    assert after("saturate", 3, 0.0, 0.0, 0.0) == [0.0] * 3
    halves = torch.tensor([0.2, 0.6], dtype=torch.float64).reshape(1, 1, 1, 2)
    assert corrupt(halves, "contrast", 2, stream()).flatten().tolist() == pytest.approx([0.3, 0.5])


def test_pixelate_shows_means_as_squares() -> None:
    x = torch.arange(32.0, dtype=torch.float64).expand(1, 1, 32, 32) / 32
    out = corrupt(x, "pixelate", 4, stream())[0, 0]  # 24 pixels for 32: of every four, two become one
    assert len(out[0].unique()) == 24
    assert torch.equal(out[0], out[-1])
    assert corrupt(x, "pixelate", 1, stream())[0, 0, 0].unique().numel() == 30


def rounded(values: np.ndarray) -> np.ndarray:
    return np.trunc(values + np.copysign(0.500001, values))


@pytest.mark.parametrize(("severity", "percent"), [(1, 40), (4, 100), (5, 125)])
def test_jpeg_rounds_cosines_block_by_block(severity: int, percent: int) -> None:
    x = rounded(pictures(2, 1, 24).double().numpy() * 255)
    steps = np.floor((LUMINANCE.numpy() * percent + 50) / 100)
    wanted = np.empty(x.shape)
    for image in range(2):
        for i in range(0, 24, 8):
            for j in range(0, 24, 8):
                block = np.s_[image, 0, i : i + 8, j : j + 8]
                kept = rounded(dctn(x[block] - 128, norm="ortho") / steps) * steps
                wanted[block] = rounded(idctn(kept, norm="ortho") + 128).clip(0, 255)
    found = corrupt(torch.from_numpy(x / 255), "jpeg", severity, stream())
    assert_equal({"x": found}, {"x": torch.from_numpy(wanted / 255)}, tolerance=1e-9)


def test_jpeg_in_colour() -> None:
    grey = pictures(3, 1)
    in_colour = corrupt(grey.repeat(1, 3, 1, 1), "jpeg", 5, stream())
    torch.testing.assert_close(in_colour, corrupt(grey, "jpeg", 5, stream()).repeat(1, 3, 1, 1), rtol=0, atol=1.5 / 255)
    orange = torch.tensor([230.0, 120.0, 30.0]).reshape(1, 3, 1, 1).expand(1, 3, 20, 20) / 255
    coded = corrupt(orange, "jpeg", 1, stream())
    # steps of the mean of a block at quality 80: 6 / 8 and 7 / 8 of a grey level
    torch.testing.assert_close(coded, orange, rtol=0, atol=3 / 255)
    assert coded.flatten(2).std(2).max() < 1e-6


def test_each_client_has_a_corruption_of_its_own() -> None:
    data = federation(pictures(3), clients=11)
    out = corrupt_clients(data, "mixed", 3, seed=5, mean=0.5, sd=0.5)
    assert all(f"{kind} 3" in out.notes[-1] for kind in KINDS)  # eleven clients, eleven kinds
    for before, after in ((data.train, out.train), (data.val, out.val), (data.test, out.test)):
        assert torch.equal(before.y, after.y)
        seen = [after.of(i)[0] for i in range(11)]
        assert all(not torch.equal(x, before.of(0)[0]) for x in seen)
        assert all(not torch.equal(seen[i], seen[j]) for i in range(11) for j in range(i))
        assert -1 <= after.x.min() <= after.x.max() <= 1


def test_a_client_is_the_kind_that_its_note_says() -> None:
    data = federation(pictures(3))
    out = corrupt_clients(data, "mixed", None, seed=5, mean=0.5, sd=0.5)
    for i, told in enumerate(out.notes[-1].split(": ")[1].split(", ")):
        client, kind, severity = told.split()
        noise = stream(5, client, "corruption", "val")
        wanted = corrupt(pictures(3), kind, int(severity), noise)
        torch.testing.assert_close(out.val.of(i)[0] * 0.5 + 0.5, wanted, rtol=0, atol=2 / 255)


def test_the_seed_decides_everything() -> None:
    data = federation(pictures(2), clients=6)
    first, again, other = (corrupt_clients(data, "mixed", None, seed=s, mean=0.5, sd=0.5) for s in (1, 1, 2))
    assert first.notes == again.notes != other.notes
    assert torch.equal(first.train.x, again.train.x)
    noisy = corrupt_clients(data, "gaussian-noise", 1, seed=1, mean=0.5, sd=0.5)
    assert not torch.equal(noisy.train.of(0)[0], noisy.train.of(1)[0])
    assert not torch.equal(noisy.train.x, noisy.test.x)


def test_by_configuration() -> None:
    options = {"partition": "iid", "clients": 3, "test": 0.25}
    plain, shifted = (load(DigitsConfig(**options, **more), seed=0) for more in ({}, {"corruption": "contrast"}))  # type: ignore[arg-type]
    assert torch.equal(plain.train.y, shifted.train.y)
    assert torch.equal(plain.train.starts, shifted.train.starts)
    assert not torch.equal(plain.test.x, shifted.test.x)
    assert 0 <= shifted.train.x.min() <= shifted.train.x.max() <= 1
    assert "corrupted" in shifted.notes[-1]
    assert "saturate" not in load(DigitsConfig(clients=20, corruption="mixed"), seed=0).notes[-1]


def test_mistakes() -> None:
    with pytest.raises(DataError, match=r"data\.severity.*data\.corruption"):
        PartitionConfig(severity=2)
    with pytest.raises(DataError, match=r'data\.corruption.*"saturate"'):
        load(DigitsConfig(corruption="saturate"), seed=0)


def test_runs_without_a_corruption_keep_their_configuration() -> None:
    # tasks are recognised by their configuration; new keys must not make old runs another task
    assert not {"corruption", "severity", "max_train"} & set(DigitsConfig().model_dump(exclude_none=True))


@pytest.mark.data
def test_real_photographs() -> None:
    options = {"use": "test", "partition": "classes", "clients": 11, "max_samples": 30}
    plain, shifted = (load(Cifar10Config(**options, **more), seed=0) for more in ({}, {"corruption": "mixed"}))  # type: ignore[arg-type]
    for i in range(11):
        changed = (plain.train.of(i)[0] - shifted.train.of(i)[0]).abs().mean().item() / 2
        assert 0.002 < changed < 0.3, shifted.notes[-1]
