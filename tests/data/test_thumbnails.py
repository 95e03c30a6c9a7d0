"""Mini-ImageNet and PACS: read from one file, dealt to clients; damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.data import load
from fedtailor.data.configs import MiniImageNetConfig, PacsConfig
from fedtailor.errors import DataError


def pictures(labels: np.ndarray) -> np.ndarray:
    """[images, height, width, channels]: red tells the label, green the row, blue the column."""
    x = np.zeros((len(labels), 4, 5, 3), dtype=np.uint8)
    x[..., 0] = labels[:, None, None]
    x[..., 1] = np.arange(4)[:, None]
    x[..., 2] = np.arange(5)
    return x


def write_mini_imagenet(root: Path, **other: Any) -> Path:
    """100 classes, each with 8 images for training and 2 for the test."""
    y = np.repeat(np.arange(100, dtype=np.uint8), 10)
    split = (np.arange(1000) % 10 >= 8).astype(np.uint8)
    path = root / "mini_imagenet32_6k.npz"
    np.savez_compressed(path, **({"x": pictures(y), "y": y, "split": split} | other))
    return path


def write_pacs(root: Path, **other: Any) -> Path:
    """In domain d, 7 (d + 1) images; all of them are mixed in the file."""
    domain = np.repeat(np.arange(4, dtype=np.uint8), [7, 14, 21, 28])
    y = (np.arange(70) % 7).astype(np.uint8)
    order = np.random.default_rng(0).permutation(70)
    path = root / "pacs32.npz"
    np.savez_compressed(path, **({"x": pictures(y)[order], "y": y[order], "domain": domain[order]} | other))
    return path


def pixels(x: torch.Tensor) -> torch.Tensor:
    return (x * 0.5 + 0.5).mul(255).round().long()


def test_mini_imagenet_is_twenty_clients_of_ten_classes(tmp_path: Path) -> None:
    write_mini_imagenet(tmp_path)
    data = load(MiniImageNetConfig(test=0.2, val=0), seed=0, root=tmp_path)
    assert len(data.clients) == 20
    assert data.outputs == 100
    assert data.shape == (3, 4, 5)
    for i in range(20):
        x, y = data.train.of(i)
        assert (len(x), len(y.unique())) == (40, 10)
        assert len(data.test.of(i)[0]) == 10
        seen = pixels(x)
        assert torch.equal(seen[:, 0], y[:, None, None].expand(-1, 4, 5))
        assert torch.equal(seen[0, 1], torch.arange(4)[:, None].expand(4, 5))
        assert torch.equal(seen[0, 2], torch.arange(5).expand(4, 5))
    holders = torch.stack([torch.bincount(data.train.of(i)[1], minlength=100) > 0 for i in range(20)])
    assert holders.sum(0).tolist() == [2] * 100


@pytest.mark.parametrize(("use", "count"), [("all", 1000), ("train", 800), ("test", 200)])
def test_parts_of_mini_imagenet(tmp_path: Path, use: Any, count: int) -> None:
    write_mini_imagenet(tmp_path)
    data = load(MiniImageNetConfig(use=use, partition="iid", clients=4), seed=0, root=tmp_path)
    assert len(data.train.x) + len(data.val.x) + len(data.test.x) == count


def test_mini_imagenet_can_be_corrupted_and_renamed(tmp_path: Path) -> None:
    write_mini_imagenet(tmp_path)
    config = MiniImageNetConfig(corruption="brightness", severity=5, permuted=0.5)
    notes = load(config, seed=0, root=tmp_path).notes
    assert notes[-1].startswith("images corrupted, with severity: client-00 brightness 5")
    assert "labels permuted at 10 clients" in notes[-2]


def test_pacs_is_one_client_per_domain(tmp_path: Path) -> None:
    write_pacs(tmp_path)
    data = load(PacsConfig(test=0.25, val=0.0), seed=0, root=tmp_path)
    assert data.clients == ("art", "cartoon", "photo", "sketch")
    assert (data.train.sizes + data.test.sizes).tolist() == [7, 14, 21, 28]
    assert data.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert torch.equal(pixels(data.train.x)[:, 0, 0, 0], data.train.y)
    assert data.notes[0] == "partition: by domain"


@pytest.mark.parametrize(
    ("config", "file"),
    [(MiniImageNetConfig(), "mini_imagenet32_6k.npz"), (PacsConfig(), "pacs32.npz")],
)
def test_absent_and_damaged_files(tmp_path: Path, config: Any, file: str) -> None:
    def message() -> str:
        with pytest.raises(DataError) as caught:
            load(config, seed=0, root=tmp_path)
        assert str(caught.value).startswith(str(tmp_path / file))
        return str(caught.value)

    missing = message()
    assert f"not found; set FEDTAILOR_DATA to the folder that holds {file}" in missing
    assert "fedtailor download" not in missing  # there is nothing to fetch it from
    path = write_mini_imagenet(tmp_path) if isinstance(config, MiniImageNetConfig) else write_pacs(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not an .npz file, or a damaged one" in message()
    damaged = bytearray(whole)
    damaged[100:140] = b"?" * 40
    path.write_bytes(damaged)
    assert "not an .npz file, or a damaged one" in message()
    path.write_bytes(b"")
    assert "not an .npz file" in message()
    with path.open("wb") as out:
        np.save(out, np.zeros(3))
    assert "not an .npz file" in message()
    np.savez(path, x=np.zeros((2, 4, 4, 3), np.uint8))
    assert "must have the arrays x, y, " in message()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"y": np.full(70, 7, np.uint8)}, r"labels outside 0\.\.6"),
        ({"domain": np.full(70, 4, np.uint8)}, r"labels outside 0\.\.3"),
        ({"domain": np.zeros(70, np.uint8)}, "has no images of the domain cartoon"),
        ({"y": np.zeros(69, np.uint8)}, "its arrays differ in length: 70 of x, 69 of y, 70 of domain"),
        ({"y": np.zeros(70)}, '"y" and "domain" must be rows of whole numbers'),
        ({"domain": np.zeros((70, 2), np.uint8)}, '"y" and "domain" must be rows of whole numbers'),
        ({"x": np.zeros((70, 3, 4, 4), np.uint8)}, r'"x" is uint8 of shape \[70, 3, 4, 4\], not uint8 of'),
        ({"x": np.zeros((70, 4, 4, 3))}, r'"x" is float64'),
        ({"x": np.array([{}] * 70)}, "not an .npz file, or a damaged one"),  # a pickle is never opened
    ],
)
def test_wrong_content(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    write_pacs(tmp_path, **other)
    with pytest.raises(DataError, match=rf"pacs32\.npz: .*{words}"):
        load(PacsConfig(), seed=0, root=tmp_path)


@pytest.mark.data
def test_real_mini_imagenet() -> None:
    data = load(MiniImageNetConfig(test=0.2, val=0), seed=0)
    assert data.shape == (3, 32, 32)
    assert (data.train.sizes.tolist(), data.test.sizes.tolist()) == ([240] * 20, [60] * 20)
    assert [len(data.train.of(i)[1].unique()) for i in range(20)] == [10] * 20
    only = load(MiniImageNetConfig(use="test", test=0, val=0), seed=0)
    assert only.train.sizes.tolist() == [60] * 20


@pytest.mark.data
def test_real_pacs() -> None:
    data = load(PacsConfig(), seed=0)
    sizes = data.train.sizes + data.val.sizes + data.test.sizes
    assert dict(zip(data.clients, sizes.tolist(), strict=True)) == {
        "art": 2048,
        "cartoon": 2344,
        "photo": 1670,
        "sketch": 3929,
    }
    assert data.outputs == 7
    brightness = [data.train.of(i)[0].mean().item() for i in range(4)]
    assert brightness[3] == max(brightness)  # sketches are lines on white paper
