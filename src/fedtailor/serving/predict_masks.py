"""Masks of new images, as files: PNG for images, NIfTI for NIfTI, .npz for .npz."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data.configs import ImageMasksConfig
from fedtailor.data.files import read_npz
from fedtailor.data.sources.image_folder import ENDINGS, read_upright
from fedtailor.data.sources.mask_folder import VOLUMES, read_image, stem_of
from fedtailor.errors import DataError, RunError
from fedtailor.experiments.store import RunFolder, write_atomically
from fedtailor.tables.serve import Personal

PALETTE = (0, 0, 0, 255, 255, 255, 230, 159, 0, 86, 180, 233, 0, 158, 115, 240, 228, 66, 204, 121, 167)  # RGB by class


def write_masks(model: Personal, run: Path, data: Path, out: Path | None = None) -> list[Path]:
    """The predicted masks of an image, of a folder of images, or of the array `x` of an .npz file."""
    if data.is_dir():
        files = sorted(f for f in data.iterdir() if f.name.lower().endswith((*ENDINGS, *VOLUMES)))
        if not files:
            raise DataError(f"{data}: has no image; known endings: {', '.join((*ENDINGS, *VOLUMES))}")
        folder = out or Path(f"{data.resolve().name}-masks")
        return [write_mask(model, run, file, folder / f"{stem_of(file)}{_ending(file)}") for file in files]
    if data.suffix == ".npz" and _has_samples(data):
        x = model.in_type(torch.from_numpy(np.ascontiguousarray(read_npz(data, ["x"])["x"])))
        return [_write_npz(out or Path(f"{data.stem}-masks.npz"), _predict(model, data, x))]
    if not data.name.lower().endswith((*ENDINGS, *VOLUMES)):
        raise DataError(f"{data}: not an image; known endings: {', '.join((*ENDINGS, *VOLUMES))}")
    return [write_mask(model, run, data, out or Path(f"{stem_of(data)}-mask{_ending(data)}"))]


def _has_samples(path: Path) -> bool:
    try:
        return bool(read_npz(path, ["x"]))
    except DataError:
        return False


def _ending(file: Path) -> str:
    return next((e for e in (".npz", ".nii.gz", ".nii") if file.name.lower().endswith(e)), ".png")


def write_mask(model: Personal, run: Path, image: Path, target: Path) -> Path:
    """The predicted mask of one image, in the image's own size."""
    if not target.name.lower().endswith(_ending(image)):
        raise RunError(f"{target}: the mask of {image.name} is written as {_ending(image)}")
    used = RunFolder.open(run).config.data
    config = used if isinstance(used, ImageMasksConfig) else ImageMasksConfig(path=image.parent)
    dimensions = _dimensions(model)
    x = torch.from_numpy(read_image(image, config, dimensions))[None]
    mask = _predict(model, image, model.in_type(x))[0]
    if target.name.endswith(".npz"):
        return _write_npz(target, mask)
    if target.name.endswith((".nii", ".nii.gz")):
        return _write_nifti(target, image, mask)
    height, width = read_upright(image, "L", 0).shape
    return _write_png(target, mask, (width, height))


def _dimensions(model: Personal) -> int:
    """Two of images, three of volumes."""
    kernels = [v.dim() - 2 for v in model.params.values() if v.dim() in (4, 5)]
    return max(kernels, default=2)


def _predict(model: Personal, source: Path, x: torch.Tensor) -> NDArray[np.uint8]:
    try:
        masks: NDArray[np.uint8] = model.predict(x)
    except RuntimeError as error:
        raise DataError(f"{source}: images of shape {list(x.shape[1:])} do not fit the model: {error}") from None
    return masks


def _write_npz(target: Path, mask: NDArray[np.uint8]) -> Path:
    content = io.BytesIO()
    np.savez_compressed(content, mask=mask)
    return _write(target, content.getvalue())


def _write_nifti(target: Path, image: Path, mask: NDArray[np.uint8]) -> Path:
    import nibabel

    known: Any = nibabel.load(image)
    target.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(mask, known.affine), target)
    return target


def _write_png(target: Path, mask: NDArray[np.uint8], size: tuple[int, int]) -> Path:
    """Numbers are the classes; a palette shows them in colours."""
    from PIL import Image

    picture = Image.fromarray(mask)
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.NEAREST)
    picture.putpalette(PALETTE)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return _write(target, content.getvalue())


def _write(target: Path, content: bytes) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    return target
