"""Masks: how they are recognised, what they become, and folders of images with masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.core.segmentation import VOID
from fedtailor.data import load
from fedtailor.data.configs import EyesConfig, ImageMasksConfig
from fedtailor.data.fingerprint import digest
from fedtailor.errors import DataError


def images(rows: int, *space: int, channels: int = 1) -> Any:
    return np.random.default_rng(0).normal(size=(rows, channels, *space)).astype(np.float32)


def masks(rows: int, *space: int, classes: int = 2) -> Any:
    return np.random.default_rng(1).integers(0, classes, size=(rows, *space))


@pytest.mark.parametrize("space", [(6, 5), (3, 6, 5)])
@pytest.mark.parametrize("form", ["int64", "uint8", "bool", "float32", "channel", "0 and 255"])
def test_auto_recognises_masks(space: tuple[int, ...], form: str) -> None:
    y = masks(8, *space)
    given = {"channel": y[:, None], "0 and 255": (y * 255).astype(np.uint8)}.get(form)
    given = y.astype(form) if given is None else given
    data = ft.federated({"a": (images(8, *space), given), "b": (images(8, *space), given)})
    assert (data.task, data.outputs) == ("segmentation", 2)
    assert data.train.y.dtype == torch.uint8
    every = torch.cat([data.train.of(0)[1], data.val.of(0)[1], data.test.of(0)[1]])
    assert sorted(map(tuple, every.flatten(1).tolist())) == sorted(map(tuple, y.reshape(8, -1).tolist()))


def test_outputs_are_the_classes_and_not_the_width() -> None:
    clients = {"a": (images(8, 6, 32), masks(8, 6, 32, classes=3))}
    assert ft.federated(clients).outputs == 3
    named = ft.federated(clients, classes=["none", "artery", "vein", "nerve"])
    assert (named.task, named.outputs) == ("segmentation", 4)


def test_other_targets_of_images_are_no_masks() -> None:
    x = images(8, 6, 5)
    assert ft.federated({"a": (x, masks(8, 7))}).task == "tokens"
    assert ft.federated({"a": (x, masks(8))}).task == "classification"
    with pytest.raises(DataError, match="regression"):  # numbers for pixels
        ft.federated({"a": (x, x[:, 0] + 0.5)})


def test_what_does_not_count_is_void() -> None:
    y = masks(8, 6, 5)
    y[:, 0, 0] = -100
    y[:, 0, 1] = VOID
    data = ft.federated({"a": (images(8, 6, 5), y)})
    assert bool((data.train.y[:, 0, :2] == VOID).all())
    assert data.outputs == 2


def test_wrong_masks_are_refused_with_the_client() -> None:
    x = images(8, 6, 5)
    with pytest.raises(DataError, match=r'client "a".*300'):
        ft.federated({"a": (x, np.full((8, 6, 5), 300))}, task="segmentation")
    with pytest.raises(DataError, match=r'client "a".*whole'):
        ft.federated({"a": (x, np.full((8, 6, 5), 0.5))}, task="segmentation")
    with pytest.raises(DataError, match=r"\[6, 5\].*\[6, 4\]"):
        ft.federated({"a": (x, masks(8, 6, 4))}, task="segmentation")
    with pytest.raises(DataError, match=r'"a", train, row 1.*class 2'):
        ft.federated({"a": (x, np.full((8, 6, 5), 2))}, task="segmentation", outputs=2)


def test_validation_images_may_be_larger_than_training_patches() -> None:
    parts = {"train": (images(8, 4, 4), masks(8, 4, 4)), "val": (images(2, 8, 10), masks(2, 8, 10))}
    data = ft.federated({"a": parts})
    assert (data.shape, data.val.x.shape) == ((1, 4, 4), (2, 1, 8, 10))
    with pytest.raises(DataError, match="samples are"):  # but of the same channels
        ft.federated({"a": parts | {"val": (images(2, 8, 10, channels=2), masks(2, 8, 10))}})


def test_images_of_two_sizes_are_padded_with_void() -> None:
    data = ft.federated({"a": (images(8, 4, 4), masks(8, 4, 4)), "b": (images(8, 3, 5), masks(8, 3, 5))})
    x, y = data.train.of(0)
    assert data.shape == (1, 4, 5)
    assert isinstance(x, torch.Tensor)
    assert bool((x[..., 4] == 0).all())
    assert bool((y[..., 4] == VOID).all())
    assert bool((data.train.of(1)[1][:, 3] == VOID).all())


class Shaken(torch.utils.data.Dataset[Any]):
    """Gives another crop each time."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.from_numpy(self.rng.integers(0, 2, size=(4, 4)))
        return y[None].float(), y


def test_masks_that_move_with_lazy_images_are_refused() -> None:
    assert ft.federated({"a": Shaken()}).task == "segmentation"  # read once, together
    with pytest.raises(DataError, match=r'client "a".*another mask'):
        ft.federated({"a": Shaken()}, lazy=True)


def write_sites(root: Path, *, ending: str = "png") -> dict[str, Any]:
    """Two sites with eight images of 6 x 5; returns the masks."""
    known = {}
    for site in ("east", "west"):
        y = masks(8, 6, 5)
        for part in ("images", "masks"):
            (root / site / part).mkdir(parents=True)
        for i in range(8):
            if ending == "png":
                image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra images")
                image.fromarray(np.full((6, 5, 3), i, np.uint8)).save(root / site / "images" / f"{i}.png")
                image.fromarray((y[i] * 255).astype(np.uint8)).convert("1").save(root / site / "masks" / f"{i}.png")
            else:
                np.savez(root / site / "images" / f"{i}.npz", image=np.full((6, 5), i, np.float32))
                np.savez(root / site / "masks" / f"{i}.npz", mask=y[i])
        known[site] = y
    return known


@pytest.mark.parametrize("ending", ["png", "npz"])
def test_a_folder_of_images_and_masks(tmp_path: Path, ending: str) -> None:
    known = write_sites(tmp_path / "eyes", ending=ending)
    config = ImageMasksConfig(path=tmp_path / "eyes")
    data = load(config, seed=0)
    assert (data.task, data.clients, data.outputs) == ("segmentation", ("east", "west"), 2)
    assert data.shape == ((3, 6, 5) if ending == "png" else (1, 6, 5))
    x, y = data.test.of(1)
    assert isinstance(x, torch.Tensor)
    number = ((x[:, 0, 0, 0] + 1) * 127.5).round().long() if ending == "png" else x[:, 0, 0, 0].long()
    assert torch.equal(y.long(), torch.from_numpy(known["west"])[number])
    before = digest(config)
    (tmp_path / "eyes" / "west" / "masks" / f"3.{ending}").write_bytes(b"other")
    assert digest(config) != before


def test_images_of_a_subject_stay_together(tmp_path: Path) -> None:
    write_sites(tmp_path / "eyes", ending="npz")
    for site in ("east", "west"):
        for i in range(8):
            for part in ("images", "masks"):
                file = tmp_path / "eyes" / site / part / f"{i}.npz"
                file.rename(file.with_name(f"p{i // 2}{'LR'[i % 2]}.npz"))
    data = load(ImageMasksConfig(path=tmp_path / "eyes", subject="^(.*)[LR]$"), seed=0)
    for i in range(2):
        people = [{int(v) // 2 for v in rows.of(i)[0][:, 0, 0, 0]} for rows in (data.train, data.val, data.test)]
        assert sum(map(len, people)) == len(set().union(*people)) == 4


def test_a_missing_mask_is_named(tmp_path: Path) -> None:
    write_sites(tmp_path / "eyes", ending="npz")
    (tmp_path / "eyes" / "west" / "masks" / "3.npz").unlink()
    with pytest.raises(DataError, match=r"masks: no mask for 3\.npz"):
        load(ImageMasksConfig(path=tmp_path / "eyes"), seed=0)
    with pytest.raises(DataError, match="images"):
        load(ImageMasksConfig(path=tmp_path), seed=0)


def test_volumes_in_nifti(tmp_path: Path) -> None:
    nibabel: Any = pytest.importorskip("nibabel", reason="needs nibabel, of the extra segmentation")
    for part in ("images", "masks"):
        (tmp_path / "ct" / "east" / part).mkdir(parents=True)
    for i in range(4):
        y = masks(1, 4, 6, 5)[0].astype(np.uint8)
        nibabel.save(nibabel.Nifti1Image(y * 100.0, np.eye(4)), tmp_path / "ct" / "east" / "images" / f"{i}.nii.gz")
        nibabel.save(nibabel.Nifti1Image(y, np.eye(4)), tmp_path / "ct" / "east" / "masks" / f"{i}.nii.gz")
    data = load(ImageMasksConfig(path=tmp_path / "ct"), seed=0)
    assert data.shape == (1, 4, 6, 5)
    assert torch.equal(data.train.x[:, 0], 100.0 * data.train.y)


@pytest.mark.data
def test_eyes_are_four_clinics_and_children_are_in_one_part() -> None:
    data = load(EyesConfig(test=0.4), seed=0)
    assert data.clients == ("chase", "drive", "hrf", "stare")
    sizes = [sum(v) for v in zip(*(rows.sizes.tolist() for rows in (data.train, data.val, data.test)), strict=True)]
    assert sizes == [28, 40, 42, 20]
    assert all(rows.sizes[0] % 2 == 0 for rows in (data.train, data.val, data.test))
    pooled = load(EyesConfig(test=0.4, pooled=True), seed=0)
    assert pooled.train.sizes.tolist() == [int(data.train.sizes.sum()), 0, 0, 0]
    assert torch.equal(pooled.test.y, data.test.y)
